"""Plans of pipelines: the schedule against a simulation written apart from it, and counts against a real stage."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpshard import PrivacyEngine
from dpshard.applications.planner import PRESETS, Clipping, Setup, Transformer
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.pipelines import (
    PipelineEstimate,
    PipelinePlan,
    make_pipeline_plan,
)
from dpshard.applications.planner.schedule import order_of, peak_of, walk
from dpshard.applications.planner.simulation import simulated
from dpshard.applications.planner.stage_simulation import (
    BACKWARD,
    FORWARD,
    SUMS,
    UPDATE,
    Stage,
    StageCounts,
)
from dpshard.applications.planner.timeline import Event
from dpshard.backends.backend import Backend
from dpshard.errors import ConfigurationError
from dpshard.records import OwnMemory

TINY = Transformer(width=64, layers=2, heads=2, vocabulary=96, seq=16)
SETUP = Setup(model=TINY, ranks=8, shard="ddp", precision="fp32", micro_batches=4)
ALL_LAYER = Clipping("all-layer")
# A product of FLOP takes a second, and nothing is sent.
HARDWARE = Hardware(gpu="h100", mfu=1.0, latency=0.0)
FLOP = 989 * 10**12


def simulate(
    forward: list[float], backward: list[float], hops: list[float], parts: int
) -> tuple[list[float], list[list[tuple[float, int, int, str]]]]:
    """Let stages act one event at a time: a stage that may hold no more parts, or has none left, goes back.

    Returns their ends, and by stage (time, parts in flight, parts that were finished, act) when acts begin.
    """
    stages = len(forward)
    inbox: list[dict[str, list[float]]] = [{"F": [], "B": []} for _ in range(stages)]  # when partners had computed
    inbox[0]["F"], inbox[-1]["B"] = [-math.inf] * parts, [-math.inf] * parts
    begun, flying, ended, seen = [0] * stages, [0] * stages, [0] * stages, [[] for _ in range(stages)]
    idle_since: list[float | None] = [0.0] * stages
    events: list[tuple[float, int, str]] = []
    ends = [0.0] * stages

    def start() -> None:
        for s in range(stages):
            since = idle_since[s]
            full = flying[s] == stages - s or begun[s] == parts
            act = "B" if full else "F"
            number = ended[s] if full else begun[s]
            if since is None or ended[s] == parts or len(inbox[s][act]) <= number:
                continue
            computed = inbox[s][act][number]
            hop = hops[s - 1] if act == "F" and s > 0 else hops[s] if act == "B" and s < stages - 1 else 0.0
            at = max(since, computed) + hop
            begun[s] += act == "F"
            flying[s] += act == "F"
            seen[s].append((at, flying[s], ended[s], act))
            idle_since[s] = None
            heapq.heappush(events, (at + (forward if act == "F" else backward)[s], s, act))

    start()
    while events:
        now, s, act = heapq.heappop(events)
        idle_since[s] = ends[s] = now
        if act == "B":
            flying[s], ended[s] = flying[s] - 1, ended[s] + 1
        other = s + 1 if act == "F" else s - 1
        if 0 <= other < stages:
            inbox[other][act].append(now)
        start()
    return ends, seen


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_that_of_a_simulation_by_events(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 6)
    parts = stages + draw.randint(0, 7)
    forward, backward = ([draw.uniform(0.5, 3) for _ in range(stages)] for _ in "fb")
    hops = [draw.choice([0.0, draw.uniform(0, 1)]) for _ in range(stages - 1)]
    ends, seen = simulate(forward, backward, hops, parts)
    found = walk(forward, backward, hops, parts)
    assert found.ends == pytest.approx(ends)
    assert found.last_backwards == pytest.approx([acts[-1][0] for acts in seen])
    counts = a_stage(held=draw.randint(1, 99), kept=draw.choice([0, 50]), buffers=7)
    for s, acts in enumerate(seen):
        most = max(
            counts.peaks[FORWARD if act == "F" else BACKWARD] + (flying - 1) * counts.held + ended * counts.kept
            for _, flying, ended, act in acts
        )
        late = counts.peaks[SUMS] + (parts - 1) * counts.kept
        assert peak_of(counts, order_of(s, stages, parts), parts) == max(most, late) + parts * counts.buffers
        assert max(flying for _, flying, *_ in acts) == stages - s


def a_stage(*, held: int = 0, kept: int = 0, buffers: int = 0, collectives: Any = None) -> StageCounts:
    peaks = {FORWARD: 1000 + held, BACKWARD: 1010 + held + kept, SUMS: 1005 + kept if kept else 0, UPDATE: 900}
    return StageCounts(FLOP, 2 * FLOP, FLOP if kept else 0, held, kept, buffers, peaks, collectives or {})


def a_plan(stages: int, parts: int, clipping: Clipping | None = None, **stage: Any) -> PipelinePlan:
    """Equal stages without parameters, which send nothing."""
    setup = replace(SETUP, ranks=stages, micro_batches=parts, precision="bf16")
    estimate = PipelineEstimate(clipping, (a_stage(**stage),) * stages)
    return PipelinePlan(setup, 1, (0,) * stages, (0,) * stages, 2048, 0, (estimate,))


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (4, 8), (8, 64)])
def test_equal_stages_wait_as_the_textbook_says(stages: int, parts: int) -> None:
    plan = a_plan(stages, parts)
    times = plan.times(plan.estimates[0], HARDWARE)
    assert times.bubble == pytest.approx((stages - 1) / (parts + stages - 1))
    assert times.total == times.span == pytest.approx(3 * (parts + stages - 1))
    assert plan.rate(plan.estimates[0], HARDWARE) == pytest.approx(parts * 2048 / times.span / stages)


def test_groups_that_span_stages_are_summed_after_the_schedule() -> None:
    plan = a_plan(4, 8, ALL_LAYER, kept=50)
    times = plan.times(plan.estimates[0], HARDWARE)
    assert times.sums == pytest.approx(8 * 1)
    assert times.total == pytest.approx(times.span + 8)
    # The first stage is in its last backward, or begins to sum, with the records of all parts.
    assert plan.peaks(plan.estimates[0])[0] == 1010 + 50 + 7 * 50


def test_replicas_sum_beside_the_last_backward_only_without_clipping() -> None:
    seconds = 1.5  # of each stage's all-reduce over two replicas in one node
    elements = round(seconds * 450e9 / 4)
    private, ordinary = (
        replace(a_plan(2, 4, clipping), setup=replace(SETUP, ranks=4, precision="bf16"), shards=(elements,) * 2)
        for clipping in (Clipping("layer-wise"), None)
    )
    assert private.times(private.estimates[0], HARDWARE).reduction == pytest.approx(seconds)
    assert ordinary.times(ordinary.estimates[0], HARDWARE).reduction == 0.0  # its last backward takes 2 s


@pytest.fixture(scope="module")
def counted() -> PipelinePlan:
    return make_pipeline_plan(SETUP, pp=2, micro_batch=3, clippings=[ALL_LAYER])


def test_stages_do_the_work_of_the_whole_model(counted: PipelinePlan) -> None:
    with simulated(replace(SETUP, micro_batches=1)) as whole:
        assert sum(counted.elements) == whole.elements
        assert sum(s.forward + s.backward for s in counted.estimates[0].stages) == whole.count(None, 3).flops


def test_one_stage_is_the_whole_model(counted: PipelinePlan) -> None:
    alone = make_pipeline_plan(SETUP, pp=1, micro_batch=3)
    (stage,) = alone.estimates[0].stages
    assert stage.forward + stage.backward == sum(s.forward + s.backward for s in counted.estimates[0].stages)
    assert (alone.elements, alone.shards) == ((sum(counted.elements),),) * 2
    assert len(alone.estimates) == 1
    times = alone.times(alone.estimates[0], HARDWARE)
    assert times.bubble == pytest.approx(0)
    assert alone.replicas == 8


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def in_parts(request: pytest.FixtureRequest) -> PipelinePlan:
    """Two stages of two ranks each."""
    return make_pipeline_plan(replace(SETUP, tp=2, precision=request.param), pp=2, micro_batch=3)


def test_a_rank_of_a_stage_does_its_part_of_the_work(counted: PipelinePlan, in_parts: PipelinePlan) -> None:
    assert [e.clipping for e in in_parts.estimates] == [None]  # the engine trains no other
    assert in_parts.elements == counted.elements
    assert in_parts.replicas == 2
    for part, whole in zip(in_parts.estimates[0].stages, counted.estimates[0].stages, strict=True):
        assert (part.forward, part.backward) == (whole.forward // 2, whole.backward // 2)
    # Norms are whole on each rank, and so are the biases of the two products that are summed.
    for shard, elements, whole in zip(in_parts.shards, in_parts.elements, (6, 8), strict=True):
        assert 2 * shard == elements + whole * TINY.width


def test_ranks_of_a_stage_send_each_other_hidden_states(counted: PipelinePlan, in_parts: PipelinePlan) -> None:
    """An attention and an MLP gather their input and scatter their output; backward does the reverse."""
    narrow = in_parts.setup.precision == "bf16"
    whole = 3 * TINY.seq * TINY.width * (2 if narrow else 4)
    assert counted.sent == 3 * TINY.seq * TINY.width * 4
    assert in_parts.sent == whole // 2  # each rank its part of the tokens
    table = 0 if narrow else 1  # of tokens: always float32
    gathered_and_scattered = [
        {FORWARD: (2, 2 + table), BACKWARD: (2 + table, 2)},
        {FORWARD: (3, 2), BACKWARD: (2, 3)},  # and the head's input
    ]
    for stage, expected in zip(in_parts.estimates[0].stages, gathered_and_scattered, strict=True):
        for phase, calls in expected.items():
            events = [e for e in stage.collectives[phase] if e.nbytes == whole and (e.dtype == "bfloat16") is narrow]
            kinds = [e.kind for e in events]
            assert (kinds.count("all-gather"), kinds.count("reduce-scatter")) == calls
            assert {(e.ranks, e.within_node) for e in events} == {(2, True)}


def test_products_wait_for_the_collectives_of_their_stage() -> None:
    """A gather of this size takes a second: a forward with two takes 3, and a backward with one takes 3."""
    gather = Event(FORWARD, kind="all-gather", nbytes=900 * 10**9, ranks=2, waits=True)
    collectives = {FORWARD: (gather, gather), BACKWARD: (gather,)}
    plan = a_plan(4, 8, collectives=collectives)
    times = plan.times(plan.estimates[0], HARDWARE)
    assert times.span == pytest.approx((8 + 3) * (3 + 3))
    assert times.within == pytest.approx(8 * 3)
    assert times.bubble == pytest.approx(3 / 11)
    two = replace(plan, setup=replace(plan.setup, ranks=8, tp=2))
    assert two.replicas == 1
    assert two.rate(two.estimates[0], HARDWARE) == pytest.approx(8 * 2048 / 66 / 8)


def test_a_hop_leaves_the_node_if_the_next_stage_does() -> None:
    """Ranks of a stage stand side by side: of 4 stages of 4 ranks two share a node of 8."""
    plan = replace(a_plan(4, 4), setup=replace(SETUP, ranks=16, tp=4, precision="bf16"), sent=450 * 10**9)
    assert plan._hops(replace(HARDWARE, inter=50.0)) == pytest.approx([1.0, 9.0, 1.0])


@pytest.mark.filterwarnings("ignore:This loop feeds")
def test_kept_records_are_those_of_a_real_stage(counted: PipelinePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that an engine on values copies at the end of a backward, for a group on several stages."""
    model = Stage(replace(TINY, layers=1), 16, TINY.block(checkpointing=False), first=True, last=False)
    monkeypatch.setattr(Backend, "own_groups", lambda _, groups: (tuple(groups), frozenset([0])))
    engine = PrivacyEngine(
        model, batch_size=3, sample_size=3, steps=1, noise_multiplier=1.0, target_delta=1e-5, verify=False
    )
    copied: dict[int, int] = {}
    copy = OwnMemory.copy

    def noted(self: OwnMemory, x: Tensor) -> Tensor:
        y = copy(self, x)
        copied[y.untyped_storage()._cdata] = y.untyped_storage().nbytes()
        return y

    monkeypatch.setattr(OwnMemory, "copy", noted)
    output = model(torch.zeros(3, 16, dtype=torch.int64))
    output.backward(torch.ones_like(output))
    kept = counted.estimates[1].stages[0].kept
    assert kept == pytest.approx(sum(copied.values()), rel=0.01)
    engine.detach()


@pytest.mark.parametrize(
    ("changes", "pp", "message"),
    [
        ({}, 3, "do not divide into pipelines"),
        ({"ranks": 9, "model": replace(TINY, layers=4)}, 3, "4 layers"),
        ({"tp": 2}, 2, "refuses tensor parallelism"),
        ({"cp": 2}, 2, "refuses context parallelism"),
        ({"tp": 16, "ranks": 32, "clippings": ()}, 2, "does not divide a node of 8"),
        ({"tp": 8, "clippings": ()}, 2, "pipelines of 2 stages of 8 ranks each"),
        ({"tp": 4, "clippings": ()}, 2, "2 heads do not divide"),
        ({"shard": "fsdp2"}, 2, "Choose shard=ddp"),
        ({"micro_batches": 1}, 2, "at least as many parts"),
        ({"model": "gpt2-xl"}, 2, "gpt-26b"),
        ({}, 1, "at least 2 stages"),
    ],
)
def test_pipelines_that_the_engine_does_not_train_are_refused(changes: dict[str, Any], pp: int, message: str) -> None:
    clippings = changes.get("clippings", [ALL_LAYER])
    setup = replace(SETUP, **{name: value for name, value in changes.items() if name != "clippings"})
    with pytest.raises(ConfigurationError, match=message):
        make_pipeline_plan(setup, pp=pp, clippings=clippings)


def test_two_passes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one backward pass"):
        make_pipeline_plan(SETUP, pp=2, clippings=[Clipping("all-layer", "mixed-ghost")])


@pytest.mark.exhaustive
def test_the_command_plans_a_pipeline(tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "gpt-26b", TINY)
    options = ["--model", "gpt-26b", "--ranks", 8, "--pp", 2]
    of_step = ["--shard", "ddp", "--micro-batches", 4, "--clipping", "layer-wise", "--gpu-memory", 80]
    path = tmp_path / "plan.json"
    printed = " ".join(run("plan", *options, *of_step, "--json", path).stdout.split())
    for text in ("4 pipelines of 2 stages on 8 ranks", "stages wait", "peak GiB, worst stage", "Fits 80 GiB: not"):
        assert text in printed
    found = json.loads(path.read_text())["estimates"][1]
    assert len(found["peak_bytes"]) == 2
    assert found["rate_per_gpu"] > 0
    for wrong, message in (
        (["--shard", "fsdp2"], "Choose shard=ddp"),
        (
            ["--shard", "ddp", "--micro-batches", 4, "--tp", 2, "--clipping", "layer-wise"],
            "for ordinary training alone",
        ),
        (["--plot", tmp_path / "x.png"], "--plot does not draw"),
        (["--batch-size", 9, "--sample-size", 99, "--steps", 9, "--noise-multiplier", 1.0], "whole run"),
    ):
        assert message in " ".join(run("plan", *options, *wrong, exit_code=2).stderr.split())
    printed = " ".join(run("plan", *options, "--shard", "ddp", "--micro-batches", 4, "--tp", 2).stdout.split())
    for text in (
        "2 pipelines of 2 stages of 2 ranks each",
        "4 parts of 1 sample, 1F1B",
        "of it, within stages",
        "it cannot train them yet",
    ):
        assert text in printed
    assert "block-wise" not in printed
