"""Trains torchtitan's debug model by a PrivateTrainer on each rank; reports how exact the update was.

Usage, on each rank: python titan_worker.py FOLDER CASE..., of CASES, MORE, ON_FOUR and FAULTY of test_torchtitan.py, or
"resumed", "resumed pipeline", "elsewhere", "journal lost", "refused", "command line".
"""

import copy
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.backends.model_parts import ModelParts
from dpshard.backends.stages import Stages
from dpshard.checkpoint.journal import Journal
from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.integrations.test_torchtitan import CASES, FAULTY, MORE, ON_FOUR, REFUSED, VERIFIED
from tests.integrations.titan_setup import (
    CHECKPOINTING,
    TEXTS,
    Bytes,
    ConfigManager,
    DocumentLosses,
    causal,
    debug_run,
    mixture,
)


def configured(folder: Path, verified: bool = False, **options: Any) -> Any:
    config = debug_run()
    config.dump_folder = str(folder)
    if "experts" in options:
        mixture(config, wide=options["experts"] == "wide")
    parallel = config.parallelism
    parallel.tensor_parallel_degree = options.get("tp", 1)
    parallel.context_parallel_degree = options.get("cp", 1)
    parallel.pipeline_parallel_degree = options.get("pp", 1)
    parallel.pipeline_parallel_schedule = options.get("schedule", "1F1B")
    parallel.pipeline_parallel_microbatch_size = options.get("part", 1)
    parallel.data_parallel_replicate_degree = options.get("copies", 1)
    precision = config.training.mixed_precision_param = options.get("precision", "float32")
    if precision == "float64":
        config.training.dtype = config.training.mixed_precision_reduce = precision
    config.privacy.verify = verified
    config.activation_checkpoint = CHECKPOINTING[options.get("checkpointing", "none")]
    config.privacy.max_grad_norm = options.get("bound", 1.5)
    config.privacy.clipping_style = options.get("style", "all-layer")
    config.privacy.documents_per_row = options.get("per_row", 1)
    if config.privacy.documents_per_row == 1 and not options.get("masked"):
        causal(config.model_spec.model)
    config.model_spec.model.enable_weight_tying = options.get("tied", False)
    if options.get("compiled"):
        config.compile.enable, config.compile.backend = True, "aot_eager"
    return config


# Counts of tokens, and what they move
COUNTED = ("expert_bias_E", "tokens_per_expert_E")


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def update(folder: Path, case: str) -> dict[str, Any]:
    """The error of the sum that reaches the optimizer, relative to that of single documents, in float64."""
    options = (CASES | MORE | ON_FOUR | FAULTY)[case]
    trainer = configured(folder, case in VERIFIED, **options).build()
    before = {plain_name(name): whole(p).detach().clone() for name, p in trainer.model_parts[0].named_parameters()}
    if trainer.parallel_dims.pp_enabled:
        before = of_all_stages(before, trainer)
    with FAULTS.get(options.get("fault", ""), nullcontext)():
        trainer.train()
    found = {plain_name(name): whole(p.grad) for name, p in trainer.model_parts[0].named_parameters()}
    if trainer.parallel_dims.pp_enabled:
        found = of_all_stages(found, trainer)
    engine, buffers = trainer.engine, trainer.model_parts[0].named_buffers()
    figures, groups = engine.metrics(), engine.mechanism.clipping_groups
    true, losses, clipped = of_single_documents(trainer, before, groups, list(engine.thresholds.values()))
    trainer.close()
    engine.detach()
    off, size = (
        sum(float(x.double().square().sum()) for x in xs) ** 0.5
        for xs in ([found[name] - true[name] for name in true], true.values())
    )
    return {
        "error": off / size,
        "loss": figures["loss"] / losses - 1,
        "clipped": [figures["clip_fraction"], clipped],
        "counted": sum(float(x.abs().sum()) for name, x in buffers if name.endswith(COUNTED)),
        "groups": len(groups),
    }


def of_all_stages(own: dict[str, Tensor], trainer: Any) -> dict[str, Tensor]:
    group = trainer.parallel_dims.get_mesh("pp").get_group()
    stages: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(stages, own, group=group)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def own_norms(self: Stages, x: Tensor, gather: Any = Stages.gather) -> Tensor:
    rows = gather(self, x)
    if x.is_floating_point():
        rows[torch.arange(len(rows)) != self.rank] = -1.0
    return rows


def mean_of_tokens(_: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), None


def norm_of_a_part(self: ModelParts, cut_B: Tensor, _: Tensor) -> Tensor:
    return self.gather(cut_B)[0]  # the same on all ranks, or the digest raises


FAULTS: dict[str, Any] = {
    "norms of a part": lambda: mock.patch.object(ModelParts, "norm_sq", norm_of_a_part),
    "own norms": lambda: mock.patch.object(Stages, "gather", own_norms),
    "mean of tokens": lambda: mock.patch.multiple(
        DocumentLosses, __call__=mean_of_tokens, take=lambda *_: torch.zeros(4)
    ),
}


def of_single_documents(trainer: Any, parameters: dict[str, Tensor], groups: Any, thresholds: list[float]) -> Any:
    """The sum of clipped gradients, the mean loss and the share of clipped norms; each rank takes some documents."""
    config = copy.deepcopy(trainer.model_config)
    causal(config)
    model = config.build().double()
    model.load_state_dict(parameters, strict=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(parameters[name])
    names, values = zip(*model.named_parameters(), strict=True)
    total = {name: torch.zeros_like(p) for name, p in zip(names, values, strict=True)}
    figures = torch.zeros(2, dtype=torch.float64)  # the sum of losses, and how many norms are clipped
    encode = partial(Bytes(None).encode, add_bos=True, add_eos=True)
    for text in TEXTS[torch.distributed.get_rank() :: torch.distributed.get_world_size()]:
        ids = torch.tensor(encode(text))[:65]
        logits = model(ids[None, :-1], torch.arange(len(ids) - 1)[None])[0]
        loss = F.cross_entropy(logits, ids[1:])
        figures[0] += float(loss)
        gradients = dict(zip(names, torch.autograd.grad(loss, values), strict=True))
        for group, threshold in zip(groups, thresholds, strict=True):
            norm = sum(float(gradients[plain_name(name)].square().sum()) for name in group) ** 0.5
            figures[1] += norm > threshold
            for name in map(plain_name, group):
                total[name] += gradients[name] * min(1.0, threshold / norm) / len(TEXTS)
    for tensor in (figures, *total.values()):
        torch.distributed.all_reduce(tensor)
    losses, clipped = (figures / len(TEXTS)).tolist()
    return total, losses, clipped / len(groups)


def resumed(folder: Path) -> dict[str, Any]:
    """Three steps with noise; then the last of them again, twice, from the checkpoint of the second.

    First as it was, then in smaller micro-batches, in which sums round otherwise.
    """
    return compared(folder, *(noisy_run(folder, rows) for rows in (4, 4, 2)))


def resumed_pipeline(folder: Path) -> dict[str, Any]:
    """The same on two stages; the second repetition runs without stages."""
    return compared(folder, *(noisy_run(folder, 4, pp=stages) for stages in (2, 2, 1)))


def compared(folder: Path, first: Any, again: Any, otherwise: Any) -> dict[str, Any]:
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, first.engine.state_dict())
    pairs = zip(first.model_parts[0].parameters(), again.model_parts[0].parameters(), strict=True)
    return {
        "equal": all(torch.equal(whole(a), whole(b)) for a, b in pairs),
        "epsilon": [trainer.engine.epsilon() for trainer in (first, again, otherwise)],
        "shared": all(state == states[0] for state in states),
        "statement": again.engine.statement(),
        "steps": [first.engine.step, again.engine.step, again.step],
        "mode": oct((folder / "checkpoint").stat().st_mode & 0o777),
        "noted": (folder / "checkpoint" / "releases.journal").stat().st_size,
    }


def noisy_run(folder: Path, rows: int, **options: Any) -> Any:
    """A trainer after three steps, from the checkpoint of the second if there is one; validates at the end, if it has
    no stages."""
    config = configured(folder, **options)
    config.privacy.noise_multiplier, config.training.local_batch_size, config.training.global_batch_size = 1.0, rows, 8
    config.training.steps, config.checkpoint.interval = 3, 2
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, False
    config.validator.enable, config.validator.freq, config.validator.steps = not options, 3, 1
    config.validator.dataloader.dataset = "notes"
    trainer = config.build()
    trainer.train()
    trainer.close()
    trainer.engine.detach()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (folder / "checkpoint" / "step-3").rename(folder / f"later-{time.monotonic_ns()}")
    torch.distributed.barrier()
    return trainer


def elsewhere(folder: Path) -> str:
    """What a checkpoint of "resumed" raises in the folder of another run, whose journal does not know its releases."""
    if torch.distributed.get_rank() == 0:
        journal = Journal(folder / "checkpoint" / "releases.journal")
        for step in range(4):
            journal.note(step, bytes(16)).result()
    torch.distributed.barrier()
    return what_loading_raises(folder)


def what_loading_raises(folder: Path) -> str:
    """What a checkpoint of "resumed" raises in the folder of a run, beside the journal that lies there."""
    config = configured(folder)
    config.privacy.noise_multiplier, config.training.steps, config.training.global_batch_size = 1.0, 3, 8
    config.checkpoint.enable, config.checkpoint.initial_load_model_only = True, False
    config.checkpoint.initial_load_path = str(folder.parent / "resumed" / "checkpoint" / "step-2")
    trainer = config.build()
    try:
        trainer.train()
    except DpshardError as error:
        return str(error)
    finally:
        trainer.close()
        trainer.engine.detach()
    return f"epsilon = {trainer.engine.epsilon()}"


def refused(folder: Path) -> dict[str, str]:
    """What each setting raises."""
    messages = {}
    for setting, (change, _) in REFUSED.items():
        config = configured(folder)
        change(config)
        try:
            config.build()
        except DpshardError as error:
            messages[setting] = str(error)
    return messages


def command_line(_: Path) -> dict[str, Any]:
    """What torchtitan's parser makes of options of the section [privacy]."""
    options = ["--module", "tests.integrations.titan_setup", "--config", "debug_run"]
    options += ["--privacy.target_epsilon", "3", "--privacy.noise_multiplier", "None"]
    privacy = ConfigManager().parse_args([*options, "--privacy.clipping_style", "block-wise"]).privacy
    return {name: getattr(privacy, name) for name in ("target_epsilon", "noise_multiplier", "clipping_style")}


def work() -> list[Any]:
    folder, *cases = sys.argv[1:]
    actions = {
        "resumed": resumed,
        "resumed pipeline": resumed_pipeline,
        "elsewhere": elsewhere,
        "journal lost": what_loading_raises,
        "refused": refused,
        "command line": command_line,
    }
    return [actions.get(case, lambda path, case=case: update(path, case))(Path(folder) / case) for case in cases]


if __name__ == "__main__":
    main(work)
