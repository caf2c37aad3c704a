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


def a_stage(*, held: int = 0, kept: int = 0, buffers: int = 0, forward: int = FLOP, backward: int = 2 * FLOP) -> Any:
    peaks = {FORWARD: 1000 + held, BACKWARD: 1010 + held + kept, SUMS: 1005 + kept if kept else 0, UPDATE: 900}
    return StageCounts(forward, backward, FLOP if kept else 0, held, kept, buffers, peaks)


def a_plan(stages: int, parts: int, clipping: Clipping | None = None, **stage: Any) -> PipelinePlan:
    """Equal stages without parameters, which send nothing."""
    setup = replace(SETUP, ranks=stages, micro_batches=parts, precision="bf16")
    estimate = PipelineEstimate(clipping, (a_stage(**stage),) * stages)
    return PipelinePlan(setup, 1, (0,) * stages, 2048, 0, (estimate,))


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
        replace(a_plan(2, 4, clipping), setup=replace(SETUP, ranks=4, precision="bf16"), elements=(elements,) * 2)
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
        ({"tp": 2}, 2, "refuses tensor and context"),
        ({"shard": "fsdp2"}, 2, "Choose shard=ddp"),
        ({"micro_batches": 1}, 2, "at least as many parts"),
        ({"model": "gpt2-xl"}, 2, "gpt-26b"),
        ({}, 1, "at least 2 stages"),
    ],
)
def test_pipelines_that_the_engine_does_not_train_are_refused(changes: dict[str, Any], pp: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_pipeline_plan(replace(SETUP, **changes), pp=pp)


def test_two_passes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one backward pass"):
        make_pipeline_plan(SETUP, pp=2, clippings=[Clipping("all-layer", "mixed-ghost")])


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
        (["--tp", 2], "refuses tensor"),
        (["--plot", tmp_path / "x.png"], "--plot does not draw"),
        (["--batch-size", 9, "--sample-size", 99, "--steps", 9, "--noise-multiplier", 1.0], "whole run"),
    ):
        assert message in " ".join(run("plan", *options, *wrong, exit_code=2).stderr.split())
