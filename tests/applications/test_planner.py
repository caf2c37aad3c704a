"""Plans: counts known by hand, formulas of the paper, the search for a micro-batch, and the output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpshard.applications.planner import Clipping, Estimate, Plan, Setup, Transformer, make_plan
from dpshard.applications.planner.advice import advise
from dpshard.applications.planner.counts import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, RECORDS
from dpshard.applications.planner.estimates import GIB, largest_micro_batch, zero_model_states
from dpshard.applications.planner.meter import Meter, UnreadValues
from dpshard.applications.planner.models import PRESETS, build
from dpshard.applications.planner.simulation import simulated
from dpshard.clipping import scheme
from dpshard.errors import ConfigurationError, DpshardError
from tests.grids import quick

TINY = Transformer(width=64, layers=2, heads=2, vocabulary=96, seq=16)
SETUP = Setup(model=TINY, ranks=4, precision="fp32")


def matrix_flops(tokens: int, *, matrices: int) -> int:
    """Forward and backward of a GPT: each weight is in three products, of two operations per element and token."""
    return 6 * tokens * matrices


def test_flops_and_memory_of_a_linear_layer() -> None:
    fake = FakeTensorMode()
    meter = Meter(fake)
    with fake, meter:
        layer = nn.Linear(30, 20, bias=False)
        meter.label(layer.parameters(), PARAMETERS)
        x = torch.zeros(7, 30, requires_grad=True)
        meter.restart()
        layer(x).sum().backward()
    assert meter.counts.flops == 3 * 2 * 7 * 30 * 20  # output, and the gradients of input and weight
    parts = meter.counts.parts()
    assert parts[PARAMETERS] == 4 * 30 * 20
    assert sum(parts.values()) == meter.counts.peak >= 4 * (2 * 30 * 20 + 2 * 7 * 30)


def test_memory_that_is_freed_does_not_count_twice() -> None:
    fake = FakeTensorMode()
    meter = Meter(fake)
    with fake, meter:
        for _ in range(3):
            x = torch.zeros(1000)
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(4000)
            x.untyped_storage().resize_(0)
            del x
    assert sum(meter.counts.parts().values()) == meter.counts.peak == 4000


def test_values_are_made_up_for_fake_tensors_alone() -> None:
    """A tensor of a training must never get the value that lets a guard pass."""
    real = torch.tensor([True, True])
    with UnreadValues():
        assert bool(real.all())
        assert float(torch.tensor(3.5)) == 3.5
        with FakeTensorMode():
            assert not bool(torch.ones(2).bool().any())
            assert float(torch.ones(())) == 0.0
    with FakeTensorMode(), pytest.raises(RuntimeError):
        bool(torch.ones(2).any())


def test_flops_of_an_ordinary_step_are_those_of_its_products() -> None:
    B, T, D = 3, TINY.seq, TINY.width
    with simulated(SETUP) as simulation:
        counts = simulation.count(None, B)
    blocks, head = 12 * D * D * TINY.layers, TINY.vocabulary * D
    attention = TINY.layers * (4 + 10) * B * T * T * D  # 2 forward; 5 backward, one again
    assert counts.flops == matrix_flops(B * T, matrices=blocks + head) + attention


@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
def test_sgd_keeps_no_states(shard: Any) -> None:
    with simulated(replace(SETUP, shard=shard, optimizer="sgd")) as simulation:
        assert simulation.count(None, 1).parts()[OPTIMIZER] == 0


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_flops_of_clipping_are_those_of_ghost_norms(style: str) -> None:
    """Ordinary training plus Gram products, 2 T^2 (D + P) per sample and linear layer, and weighted sums."""
    B, T, D, V = 2, TINY.seq, TINY.width, TINY.vocabulary
    with simulated(SETUP) as simulation:
        ordinary = simulation.count(None, B).flops
        private = simulation.count(Clipping(style), B).flops
    sides = TINY.layers * ((D + 3 * D) + (D + D) + (D + 4 * D) + (4 * D + D)) + (D + V)
    # Biases, norms and positions have a gradient per sample, weighted by its factor.
    small = TINY.layers * ((3 + 1 + 4 + 1) + 2 * 2) * D + 2 * D + T * D
    assert private - ordinary == 2 * B * T * T * sides + 2 * B * small


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_sample_costs_layer_wise_clipping_no_product(checkpointing: bool) -> None:
    """Its gradient is the batch's, which is computed anyway; checkpointing repeats no needless product."""
    with simulated(replace(SETUP, checkpointing=checkpointing)) as simulation:
        weighted = 2 * (simulation.elements - TINY.vocabulary * TINY.width)  # all but the table of tokens
        assert simulation.count(Clipping("layer-wise"), 1).flops == simulation.count(None, 1).flops + weighted


def test_model_states_are_those_of_zero() -> None:
    psi, ranks = 7_500_000_000, 64  # Table 1 of Rajbhandari et al. 2020, arXiv:1910.02054, in GB: 120, 31.4, 16.6, 1.9
    found = [round(x / 1e9, 1) for x in zero_model_states(psi, ranks).values()]
    assert found == [120.0, 31.4, 16.6, 1.9]


def test_counted_model_states_are_the_formula() -> None:
    """Parameters, gradients and Adam's states are 16 Psi / N under FSDP2, 16 Psi (and buckets) under DDP."""
    shape = replace(TINY, vocabulary=128)
    for shard, ranks in (("fsdp2", 4), ("ddp", 4)):
        with simulated(Setup(model=shape, ranks=ranks, shard=shard)) as simulation:  # type: ignore[arg-type]
            simulation.count(None, 1)
            with simulation.fake, simulation.meter:
                states = sum(
                    x.untyped_storage().nbytes()
                    for p in simulation.model.parameters()
                    for x in (
                        p.to_local() if hasattr(p, "to_local") else p,
                        *(
                            s.to_local() if hasattr(s, "to_local") else s
                            for name, s in simulation.optimizer.state[p].items()
                            if name != "step"
                        ),
                    )
                )
            psi = simulation.elements
        # Without the gradients, which the step has dropped: 4 of 16 bytes.
        expected = zero_model_states(psi, ranks)["stage 0 (DDP)" if shard == "ddp" else "stage 3 (FSDP)"] * 12 / 16
        assert states == expected


@pytest.mark.exhaustive
def test_records_of_all_layers_grow_with_the_samples_and_checkpointing_keeps_them() -> None:
    setup = Setup(model=replace(TINY, layers=4), ranks=64, checkpointing=True)
    with simulated(setup) as simulation:
        some, more = (simulation.count(Clipping("all-layer"), B).parts()[RECORDS] for B in (32, 64))
        layer_wise = simulation.count(Clipping("layer-wise"), 64).parts()[RECORDS]
    T, D, V = TINY.seq, TINY.width, TINY.vocabulary
    linear = 4 * ((D + 3 * D) + (D + D) + (D + 4 * D) + (4 * D + D)) + (D + V)
    assert some == pytest.approx(2 * 32 * T * linear, rel=0.15)  # bfloat16; biases, norms and tokens are small
    assert more == pytest.approx(2 * some, rel=0.05)
    assert layer_wise < more / 4


@pytest.mark.parametrize("clipping", quick(Clipping("block-wise"), rest=[Clipping("all-layer", "mixed-ghost")]))
@pytest.mark.exhaustive
def test_two_passes_and_blocks_need_no_more_memory_in_a_deeper_model(
    clipping: Clipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole clipped sums are freed with their unit; the second of two passes waits for no other parameter."""
    for place in ("noise.digest", "backends.checksums"):  # their batches, up to 32 MiB, hold all of this model
        monkeypatch.setattr(f"dpshard.{place}._TOGETHER", 1)
    monkeypatch.setitem(scheme.WAITING, "cpu", 0)  # sums of small groups wait up to 32 MiB
    extra = []
    for layers in (2, 4):
        setup = Setup(model=replace(TINY, width=64, layers=layers, seq=4), ranks=8, checkpointing=True)
        with simulated(setup) as simulation:
            extra.append(simulation.count(clipping, 2).peak - simulation.count(None, 2).peak)
            unit = 4 * 12 * 64 * 64  # a block in float32
    assert extra[1] <= extra[0] + unit / 10
    assert extra[0] <= 2 * unit


def test_the_parts_of_the_peak_are_told_apart() -> None:
    setup = Setup(model=TINY, ranks=2, shard="ddp", precision="fp32")
    with simulated(setup) as simulation:
        parts = simulation.count(None, 1).parts()
        psi = simulation.elements
    assert parts[PARAMETERS] == 4 * psi
    assert 8 * psi <= parts[OPTIMIZER] <= 8 * psi + 4 * 100
    assert 4 * psi <= parts[GRADIENTS] <= 12 * psi  # `.grad`, the buckets, and one bucket in reduction
    assert parts[RECORDS] == 0


def test_the_largest_micro_batch() -> None:
    def peak(B: int) -> int:
        return 100 + max(10 * B, 30 * B - 200)

    asked: list[int] = []

    def counted(B: int) -> int:
        asked.append(B)
        return peak(B)

    for start in (1, 3, 64):
        answers = [largest_micro_batch(counted, limit, (start, peak(start))) for limit in range(90, 2000, 37)]
        by_hand = [max((B for B in range(1, 100) if peak(B) <= limit), default=0) for limit in range(90, 2000, 37)]
        assert answers == by_hand
        assert answers == sorted(answers)
    asked.clear()
    assert largest_micro_batch(counted, 30 * 5000 - 100, (1, peak(1))) == 5000
    assert len(asked) <= 10
    asked.clear()

    # On a plateau the optimizer's step has the peak, so a line from there to a large micro-batch says little.
    def plateau(B: int) -> int:
        asked.append(B)
        return max(4_027_113 + 157 * B, 4_276_613 + 70_933 * (B - 45))

    assert largest_micro_batch(plateau, 4_294_967, (1, plateau(1))) == 45
    assert len(asked) <= 8


@pytest.mark.exhaustive
def test_the_largest_micro_batch_of_a_plan_fits_and_the_next_does_not() -> None:
    setup = Setup(model=replace(TINY, layers=1), ranks=4, shard="ddp")
    plan = make_plan(setup, clippings=[Clipping("all-layer")], gpu_memory=0.004)
    assert plan.gpu_memory is not None
    ordinary, private = (e.largest_micro_batch or 0 for e in plan.estimates)
    assert 0 < private <= ordinary
    with simulated(setup) as simulation:
        simulation.count(Clipping("all-layer"), 2)  # like the plan: the first count includes leftovers of probes
        peaks = [simulation.count(Clipping("all-layer"), private + more).peak for more in (0, 1)]
    assert peaks[0] <= plan.gpu_memory < peaks[1]


def test_advice_names_what_stands_in_the_way_and_the_ways_out() -> None:
    def estimate(clipping: Clipping | None, records: int, rest: int) -> Estimate:
        parts = dict.fromkeys((PARAMETERS, OPTIMIZER, GRADIENTS), 0) | {ACTIVATIONS: rest, RECORDS: records}
        return Estimate(clipping, 10**15, {}, parts)

    plan = Plan(
        Setup(model="gpt-100b", ranks=256, checkpointing=True), 2, 10**11, 80 * GIB,
        (
            estimate(None, 0, 20 * GIB),
            estimate(Clipping("all-layer"), 100 * GIB, 20 * GIB),
            estimate(Clipping("layer-wise"), 0, 25 * GIB),
        ),
    )  # fmt: skip
    text = "\n".join(advise(plan))
    assert "Fits 80 GiB at a micro-batch of 2: layer-wise, one pass (25.0 GiB)." in text
    assert "Does not fit 80 GiB at a micro-batch of 2: all-layer, one pass (120.0 GiB)." in text
    assert "50.0 GiB per sample" in text
    assert "checkpointing does not shrink them" in text
    assert "Ways out: layer-wise, one pass (25.0 GiB); a micro-batch of 1 instead of 2;" in text


def test_presets_have_the_sizes_of_the_paper() -> None:
    billions = {"gpt2-xl": 1.56, "gpt-26b": 26.2, "gpt-100b": 101.7, "gpt-1t": 1009.4, "vit-g": 1.84, "vit-10b": 10.1}
    assert set(PRESETS) == set(billions)
    with torch.device("meta"):
        model = build("vaultgemma-1b", seq=None, checkpointing=False).model
    assert sum(p.numel() for p in model.parameters()) == 1_038_741_120
    for name, expected in billions.items():
        with torch.device("meta"):
            model = PRESETS[name].build(seq=None, checkpointing=False).model
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, rel=0.005), name


def test_a_plan_leaves_no_process_group_and_takes_none() -> None:
    with pytest.raises(ConfigurationError, match="not 3 ranks"), simulated(replace(SETUP, shard="hsdp", ranks=3)):
        pass
    with simulated(SETUP), pytest.raises(ConfigurationError, match="its own process"), simulated(SETUP):
        pass
    assert not dist.is_initialized()
    with pytest.raises(ConfigurationError, match="at least 2"):
        make_plan(replace(SETUP, ranks=1))
    with pytest.raises(ConfigurationError, match="hf:NAME_OR_PATH"):
        make_plan(replace(SETUP, model="gpt-5"))
    with pytest.raises(DpshardError, match="micro_batch"):
        make_plan(SETUP, micro_batch=0)


GPT2 = {"model_type": "gpt2", "vocab_size": 99, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("fields", [GPT2, LLAMA, VIT], ids=lambda fields: fields["model_type"])
@pytest.mark.exhaustive
def test_a_transformers_configuration(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    setup = Setup(model=f"hf:{path}", ranks=8, checkpointing=True)
    plan = make_plan(setup, micro_batch=2, clippings=[Clipping("all-layer")])
    ordinary, private = plan.estimates
    assert private.sent("reduce-scatter") == ordinary.sent("reduce-scatter")
    assert private.sent("reduce-scatter").calls == 3  # two blocks and the rest
    assert private.traffic["all-gather", "bfloat16"] == ordinary.traffic["all-gather", "bfloat16"]
    assert private.flops > ordinary.flops


def test_the_command(tmp_path: Path, run: Callable[..., Any]) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--seq", 16, "--micro-batch", 2, "--checkpointing", "--gpu-memory", 0.005, "--clipping", "layer-wise"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GPT2 | {"n_layer": 1}))
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    result = run("plan", "--model", f"hf:{config}", "--ranks", 8, *options, "--json", path, "--plot", picture)
    for text in ("not private", "one pass", "By formula", "Fits 0.005 GiB", "+1 all-reduce (+8 bytes of"):
        assert text in result.stdout
    figures = json.loads(path.read_text())
    ordinary, private = figures["estimates"]
    assert private["clipping"] == {"style": "layer-wise", "mode": "auto"}
    assert {"kind": "all-reduce", "dtype": "float64", "calls": 1, "bytes": 8} in private["collectives"]
    assert private["peak_bytes"] == sum(private["parts_bytes"].values())
    assert private["largest_micro_batch"] <= ordinary["largest_micro_batch"]
    assert figures["model_states_bytes"]["stage 3 (FSDP)"] == 2 * figures["parameters"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_what_it_does_not_know(run: Callable[..., Any]) -> None:
    assert "choose one of" in run("plan", "--clipping", "layerwise", exit_code=2).stderr
    assert "hf:NAME_OR_PATH" in run("plan", "--model", "gpt-5", exit_code=2).stderr
