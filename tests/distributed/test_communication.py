"""A private step sends what an ordinary step sends, operation by operation and byte by byte.

Counted on one of 256 ranks, on fake tensors with a process group that sends nothing (applications/planner/): the real
step, exact and the same on every machine. What comes on top is engine.metrics(): once a step, 6 numbers a clipping
group and 2 for the loss are gathered, and where gradients are sharded the norm of the clipped sum is; and before the
noise what speaks against the release, and a digest of the sums. In the first step alone ranks also tell each other
which parameters got a gradient, a byte a parameter.
Two backward passes gather the blocks once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dpshard.applications.planner import Clipping, Setup, Transformer
from dpshard.applications.planner.counts import Traffic
from dpshard.applications.planner.simulation import Simulation, simulated
from dpshard.applications.planner.timeline import Event
from dpshard.interception.rows.doubts import Doubt
from tests.grids import chosen

ONE_PASS = [Clipping(style) for style in ("all-layer", "layer-wise", "block-wise", "param-wise")]
TINY = Transformer(width=24, layers=2, heads=2, vocabulary=67, seq=8, tied=True)
UNITS = TINY.layers + 1  # every block, and the rest
CASES = {
    "fsdp2": Setup(model=TINY, ranks=256),
    "fsdp2, checkpointing, 2 micro-batches": Setup(model=TINY, ranks=256, checkpointing=True, micro_batches=2),
    "fsdp2, float32, untied": Setup(model=replace(TINY, tied=False), ranks=256, precision="fp32"),
    "zero2, 2 micro-batches": Setup(model=TINY, ranks=256, shard="zero2", micro_batches=2),
    "hsdp": Setup(model=TINY, ranks=256, shard="hsdp"),
    "ddp, 2 micro-batches": Setup(model=TINY, ranks=256, shard="ddp", micro_batches=2),
}
EXTREMES = [ONE_PASS[0], ONE_PASS[-1]]


def metrics(setup: Setup, groups: int) -> dict[tuple[str, str], Traffic]:
    """What engine.metrics() sends once a step, in float64; and digests of sums and gathers, and verdicts."""
    figures = {("all-gather", "float64"): Traffic(1, setup.ranks * (6 * groups + 3) * 8)}
    digest = {("all-gather", "int64"): Traffic(1, setup.ranks * (4 + len(Doubt) + 2) * 8)}
    assert isinstance(setup.model, Transformer)
    reached = {("all-gather", "uint8"): Traffic(1, setup.ranks * groups_of(Clipping("param-wise"), setup.model))}
    norm = {} if setup.shard == "ddp" else {("all-reduce", "float64"): Traffic(1, 8)}
    return figures | digest | reached | norm


def groups_of(clipping: Clipping, shape: Transformer) -> int:
    layers = 6 * shape.layers + 3 + (not shape.tied)  # norms and linear maps; tokens, positions, norm, head
    parameters = 2 * 6 * shape.layers + 4 + (not shape.tied)
    found = {"all-layer": 1, "block-wise": shape.layers + 1, "layer-wise": layers, "param-wise": parameters}
    return found[clipping.style]


@pytest.fixture(params=chosen(CASES, "fsdp2, checkpointing, 2 micro-batches"))
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    with simulated(CASES[request.param]) as made:
        yield made


def test_a_private_step_sends_what_an_ordinary_step_sends(simulation: Simulation) -> None:
    setup = simulation.setup
    ordinary = simulation.count(None, 2).traffic()
    reductions = sum(t.calls for (kind, _), t in ordinary.items() if kind != "all-gather")
    # DDP reduces all of the small model in one bucket, in the last micro-batch; HSDP also over nodes.
    per_step = {"ddp": 1, "hsdp": 2 * UNITS}.get(setup.shard, UNITS * setup.micro_batches)
    assert reductions == per_step
    for clipping in ONE_PASS if setup == CASES["fsdp2"] else EXTREMES:  # one group, and one a parameter
        private = simulation.count(clipping, 2).traffic()
        assert isinstance(setup.model, Transformer)
        assert private == ordinary | metrics(setup, groups_of(clipping, setup.model)), clipping


@pytest.mark.exhaustive
def test_two_passes_gather_the_blocks_once_more() -> None:
    with simulated(CASES["fsdp2"]) as simulation:
        ordinary = simulation.count(None, 2).traffic()
        private = simulation.count(Clipping("all-layer", "mixed-ghost"), 2).traffic()
    gathers = ("all-gather", "bfloat16")
    assert private[gathers].calls == ordinary[gathers].calls + TINY.layers
    del private[gathers], ordinary[gathers]
    assert private == ordinary | metrics(CASES["fsdp2"], 1)


@pytest.mark.exhaustive
def test_context_parallelism_reduces_in_two_levels_and_sends_no_more() -> None:
    """Terms are summed over the ranks of a model, then slices over the data ranks; beside that, numbers a sample."""
    shape = replace(TINY, tied=False)
    setup = Setup(model=shape, ranks=256, cp=8)
    with simulated(setup) as simulation:
        ordinary = simulation.count(None, 1)
        for clipping in EXTREMES:
            private, groups = simulation.count(clipping, 1), groups_of(clipping, shape)
            assert sent(private.events, "reduce-scatter") == pytest.approx(sent(ordinary.events, "reduce-scatter"))
            same = {("all-gather", "bfloat16"), ("reduce-scatter", "bfloat16")}  # keys and values
            traffic, before = private.traffic(), ordinary.traffic()
            assert {key: traffic.pop(key) for key in same} == {key: before[key] for key in same}
            del traffic["reduce-scatter", "float32"]
            assert traffic.pop(("all-gather", "float32")) == Traffic(groups, groups * 8 * 4)  # norms
            assert sum(found.nbytes for found in traffic.values()) < 256 * 8 * (6 * groups + 20)  # metrics and digests


def sent(events: list[Event], kind: str) -> float:
    """Bytes that a rank sends in a ring."""
    return sum(event.nbytes * (1 - 1 / event.ranks) for event in events if event.kind == kind)
