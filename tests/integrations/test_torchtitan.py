"""torchtitan's debug models train by a PrivateTrainer as their documents one at a time do, and resume bit for bit.

Failure modes: a document's gradient depends on others in its row or batch, or on the count of all tokens; a part of
the model is not seen (the head in a chunked loss, a table in parts, experts); counts of tokens move the choice of
experts without noise; a stage of a pipeline clips by its own norms; a resumed run forgets a release.
"""

import sys
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.distributed.launch import launch

BESIDE = Path(sys.prefix) / "torchtitan" / "torchtitan"
pytestmark = pytest.mark.skipif(
    not BESIDE.exists() and find_spec("torchtitan") is None,
    reason="torchtitan is NOT TESTED: `make venv` installs it into .venv/torchtitan",
)

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"checkpointing": "selective"},
    "packed": {"per_row": 3, "style": "layer-wise"},
    "bfloat16": {"precision": "bfloat16"},
    "pipeline": {"pp": 2, "precision": "float64"},
    "ddp": {"copies": 2, "checkpointing": "full", "compiled": True, "style": "block-wise"},
}
MORE: dict[str, dict[str, Any]] = {
    "pipeline, masked": {"pp": 2, "masked": True, "checkpointing": "selective", "precision": "float64"},
    "pipeline in bfloat16": {"pp": 2, "part": 2, "precision": "bfloat16"},
    "experts": {"experts": "wide", "checkpointing": "selective"},
    "packed experts": {"experts": "wide", "per_row": 3, "style": "block-wise"},
    "experts in bfloat16": {"experts": "as they are"},
    "compiled": {"checkpointing": "selective", "compiled": True},
    "pipeline, compiled": {"pp": 2, "part": 2, "compiled": True, "checkpointing": "selective", "precision": "float64"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "context": {"cp": 2, "style": "block-wise", "precision": "float64"},
    "context, checkpointed": {"cp": 4, "checkpointing": "full", "precision": "float64"},
    "context and tensor": {"cp": 2, "tp": 2, "precision": "float64"},
    "context and copies": {"cp": 2, "copies": 2, "style": "layer-wise", "precision": "float64"},
    "tensor": {"tp": 2},
    "tensor, tied": {"tp": 2, "tied": True, "bound": 2.8},
    "tensor, checkpointed": {"tp": 2, "checkpointing": "full", "style": "block-wise"},
    "hsdp": {"copies": 2, "checkpointing": "selective"},
    "pipeline of four": {"pp": 4, "style": "block-wise", "checkpointing": "selective", "precision": "float64"},
    "pipelines": {"pp": 2, "style": "layer-wise", "precision": "float64"},
    "pipelines, GPipe": {"pp": 2, "schedule": "GPipe", "part": 2, "checkpointing": "full", "precision": "float64"},
}
FAULTY: dict[str, dict[str, Any]] = {
    "norms of one stage": {"pp": 2, "precision": "float64", "fault": "own norms"},
    "tokens of a part": {"pp": 2, "part": 2, "precision": "float64", "fault": "mean of tokens"},
    "norms of a part of the sequence": {"cp": 2, "precision": "float64", "fault": "norms of a part"},
    "norms of a part of the model": {"tp": 2, "fault": "norms of a part"},
}
"""Runs with a fault, which gives another update."""

VERIFIED = {
    *CASES,
    "packed experts",
    "experts in bfloat16",
    "context and tensor",
    "pipelines, GPipe",
}
"""Cases that the engine verifies, too: all kinds of parallelism, checkpoints and compiled blocks among them."""

ROUNDING = {"float32": 1e-5, "bfloat16": 2**-8, "float64": 1e-12}


def _set(path: str, value: Any) -> Any:
    def change(config: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


def _experts(path: str = "", value: Any = None, **options: Any) -> Any:
    def change(config: Any) -> None:
        from torchtitan.models.deepseek_v3 import model_registry

        config.model_spec = model_registry("debugmodel", **options)
        if path:
            _set(path, value)(config)

    return change


def _forced(config: Any) -> None:
    _experts()(config)
    config.model_spec.model.layers[1].moe.router._debug_force_load_balance = True


def _quantized(config: Any) -> None:
    from torchtitan.components.quantization import float8

    from tests.integrations.titan_setup import Float8

    float8.Float8Linear = Float8  # which is None without torchao
    layer = config.model_spec.model.layers[0].feed_forward
    layer.w1 = Float8.Config(in_features=layer.w1.in_features, out_features=layer.w1.out_features)


def _chunked(config: Any) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper

    config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)


def _streamed(config: Any) -> None:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    config.dataloader = HuggingFaceTextDataLoader.Config()


def _budgeted(config: Any) -> None:
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    config.activation_checkpoint, config.compile.enable = MemoryBudgetAC.Config(), True


def _whole_sequences(config: Any) -> None:
    config.parallelism.tensor_parallel_degree, config.parallelism.enable_sequence_parallel = 2, False


def _packed_in_parts(config: Any) -> None:
    config.privacy.documents_per_row, config.parallelism.tensor_parallel_degree = 2, 2


def _other_in_parts(config: Any) -> None:
    from torchtitan.models.common.decoder import Decoder

    model = config.model_spec.model
    config.model_spec.model = Decoder.Config(
        **{field.name: getattr(model, field.name) for field in fields(Decoder.Config)}
    )
    config.parallelism.tensor_parallel_degree = 2


def _masked_in_context(config: Any) -> None:
    from torchtitan.models.common.attention import FlexAttention

    config.parallelism.context_parallel_degree = 2
    config.model_spec.model.layers[0].attention.inner_attention = FlexAttention.Config()


def _compiled_in_context(config: Any) -> None:
    config.compile.enable, config.parallelism.context_parallel_degree = True, 2


def _compiled_in_parts(config: Any) -> None:
    config.compile.enable, config.parallelism.tensor_parallel_degree = True, 2


def _piped(path: str, value: Any) -> Any:
    def change(config: Any) -> None:
        config.parallelism.pipeline_parallel_degree = 2
        _set(path, value)(config)

    return change


def _other_in_stages(config: Any) -> None:
    _other_in_parts(config)
    config.parallelism.tensor_parallel_degree, config.parallelism.pipeline_parallel_degree = 1, 2


REFUSED: dict[str, tuple[Any, str]] = {
    "interleaved": (_piped("parallelism.pipeline_parallel_schedule", "Interleaved1F1B"), "schedule='Interleaved1F1B'"),
    "zero bubble": (_piped("parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"), "schedule='ZBVZeroBubble'"),
    "schedule by hand": (_piped("parallelism.pipeline_parallel_schedule_csv", "a.csv"), "pipeline_parallel_schedule_c"),
    "two stages a rank": (
        _piped("parallelism.module_fqns_per_model_part", [["norm"]] * 4),
        "module_fqns_per_model_part must divide the model into 2 stages",
    ),
    "stages in parts": (_piped("parallelism.tensor_parallel_degree", 2), "a stage may be divided by FSDP alone"),
    "stages in context": (_piped("parallelism.context_parallel_degree", 2), "a stage may be divided by FSDP alone"),
    "copies of stages": (_piped("parallelism.data_parallel_replicate_degree", 2), "may be divided by FSDP alone"),
    "tied stages": (_piped("model_spec.model.enable_weight_tying", True), "does not go with enable_weight_tying"),
    "packed stages": (_piped("privacy.documents_per_row", 2), "does not go with documents_per_row > 1"),
    "validated stages": (_piped("validator.enable", True), "does not go with validation"),
    "another in stages": (_other_in_stages, "pipeline_parallel_degree > 1 is verified for Llama 3"),
    "context of masks": (_masked_in_context, "context_parallel_degree > 1 needs the attention"),
    "compiled context": (_compiled_in_context, "context_parallel_degree > 1 is verified for Llama 3 without"),
    "expert": (_set("parallelism.expert_parallel_degree", 2), "expert_parallel_degree"),
    "spmd types": (_set("parallelism.spmd_backend", "spmd_types"), "spmd_backend='spmd_types'"),
    "symmetric memory": (_set("parallelism.enable_fsdp_symm_mem", True), "enable_fsdp_symm_mem"),
    "CUDA graphs": (_set("training.disable_cuda_graphs", False), "CUDA graphs"),
    "compiled parts": (_compiled_in_parts, "compile of the model"),
    "whole sequences": (_whole_sequences, "tensor_parallel_degree=2 needs enable_sequence_parallel"),
    "memory budget": (_budgeted, "MemoryBudgetAC"),
    "fake ranks": (_set("comm.mode", "fake_backend"), "comm.mode='fake_backend'"),
    "no model": (_set("model_spec", None), "the model is not a decoder"),
    "compiled experts": (_experts("compile.enable", True), "compile of the model does not go with a mixture"),
    "experts in parts": (_experts("parallelism.tensor_parallel_degree", 2), "not verified for mixtures of experts"),
    "experts by DeepEP": (_experts(moe_comm_backend="deepep"), "only moe_comm_backend='standard'"),
    "forced balance": (_forced, "_debug_force_load_balance"),
    "further tokens": (_experts(num_mtp_layers=1), "multi-token prediction"),
    "float8": (_quantized, "float8"),
    "packed without masks": (_set("privacy.documents_per_row", 2), "documents_per_row=2 needs attention"),
    "packed in parts": (_packed_in_parts, "documents_per_row=2 does not go with tensor_parallel_degree"),
    "another in parts": (_other_in_parts, "tensor_parallel_degree > 1 is verified for Llama 3 and Qwen 3, and for no"),
    "no document": (_set("privacy.documents_per_row", 0), "documents_per_row=0 must be"),
    "chunked loss": (_chunked, "the loss must be CrossEntropyLoss"),
    "stream": (_streamed, "the dataloader must be Documents.Config"),
    "forgotten budget": (_set("checkpoint.exclude_from_loading", ["privacy"]), "exclude_from_loading=['privacy']"),
    "seed checkpoint": (_set("checkpoint.create_seed_checkpoint", True), "create_seed_checkpoint"),
    "unknown data": (_set("dataloader.dataset", "none"), "dataset='none' is not a data set of torchtitan"),
}


@cache
def found(world_size: int, *cases: str) -> dict[str, list[Any]]:
    with TemporaryDirectory() as folder:
        ranks = launch(Path(__file__).parent / "titan_worker.py", world_size, folder, *cases, timeout=280)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def apart() -> dict[str, list[Any]]:
    """What `make test` asks for, in a launch of its own."""
    return found(2, "resumed", "elsewhere", "journal lost", "refused", "command line")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive
def test_the_update_is_that_of_single_documents(case: str) -> None:
    check(found(2, *CASES)[case], CASES[case].get("precision", "float32"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_further_updates_are_those_of_single_documents(case: str) -> None:
    check(found(2, *MORE)[case], MORE[case].get("precision", "float32"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_gives_another_update(case: str) -> None:
    for rank in found(2, *FAULTY)[case]:
        assert rank["error"] > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ON_FOUR)
def test_the_update_on_four_ranks_is_that_of_single_documents(case: str) -> None:
    # Alone, because torch keeps the ring's group of an equal mesh of an earlier trainer, which the engine refuses.
    crossed = [name for name, options in ON_FOUR.items() if "cp" in options and {"tp", "copies"} & options.keys()]
    cases = [case] if case in crossed else [name for name in ON_FOUR if name not in crossed]
    check(found(4, *cases)[case], ON_FOUR[case].get("precision", "float32"))


def check(ranks: list[Any], precision: str = "float32") -> None:
    """Errors are relative, to sums in float64 of documents one at a time; bfloat16 rounds to 8 bits."""
    bound = ROUNDING[precision]
    for rank in ranks:
        assert rank["error"] <= bound
        assert abs(rank["loss"]) <= bound
        clipped, true = rank["clipped"]
        assert clipped == pytest.approx(true)
        assert 0 < clipped < 1
        assert rank["counted"] == 0


@pytest.mark.exhaustive
def test_a_resumed_run_repeats_its_last_step_at_no_cost_and_counts_it_if_sums_differ() -> None:
    for rank in apart()["resumed"]:
        first, again, otherwise = rank["epsilon"]
        assert rank["equal"]
        assert first == again < otherwise
        assert rank["statement"].startswith("epsilon = ")
        assert "3 releases under Poisson sampling" in rank["statement"]
        assert rank["steps"] == [3, 3, 3]
        assert rank["mode"] == "0o700"
        assert rank["noted"] == 4 * 32  # the repetition is no further release; the one with other sums is


@pytest.mark.exhaustive
def test_a_resumed_pipeline_repeats_its_last_step_at_no_cost_and_one_process_counts_it() -> None:
    """A release is the same on all stages, and so is the state of the engine, of which a checkpoint has one copy."""
    for rank in found(2, "resumed pipeline")["resumed pipeline"]:
        first, again, otherwise = rank["epsilon"]
        assert rank["equal"]
        assert rank["shared"]
        assert first == again < otherwise
        assert rank["steps"] == [3, 3, 3]
        assert rank["noted"] == 4 * 32


def test_a_checkpoint_in_the_folder_of_another_run_is_refused() -> None:
    """Its own journal may hold releases after the checkpoint, which that of the other run does not count."""
    for message in apart()["elsewhere"]:
        assert "of another run" in message


def test_a_checkpoint_without_its_journal_is_refused() -> None:
    """The releases after it are unknown."""
    for message in apart()["journal lost"]:
        assert "releases.journal is missing" in message


@pytest.mark.parametrize("setting", REFUSED)
def test_what_private_training_does_not_support_is_refused_by_name(setting: str) -> None:
    for messages in apart()["refused"]:
        assert REFUSED[setting][1] in messages[setting]


def test_the_command_line_sets_the_section_privacy() -> None:
    for section in apart()["command line"]:
        assert section == {"target_epsilon": 3.0, "noise_multiplier": None, "clipping_style": "block-wise"}
