"""Counts of deep models from shallow ones: the same as counts of the deep models themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpshard.applications.planner import Clipping, Setup, Transformer
from dpshard.applications.planner.counts import Counts
from dpshard.applications.planner.extrapolation import FEW, MANY, Extrapolation, extrapolated, rank_of
from dpshard.applications.planner.simulation import Simulation, fake_ranks
from dpshard.applications.planner.timeline import Event

MODEL = Transformer(width=64, layers=FEW, heads=4, vocabulary=96, seq=8)


def counts_of(blocks: int) -> Counts:
    """Forward and backward of blocks whose memory depends on their place: held inputs, gathered neighbours, states."""

    def peak(at: int, blocks: int) -> int:
        return 100 * blocks + 7 * at + (50 if 0 < at < blocks - 1 else 20)

    events = [Event("forward", flops=5)]
    memory = [100 * blocks]
    for at in range(blocks):
        events += [Event("forward", kind="all-gather", dtype="bfloat16", nbytes=8), Event("forward", flops=3)]
        memory += [peak(at, blocks), peak(at, blocks) - 5]
    for at in reversed(range(blocks)):
        events += [Event("backward", flops=6), Event("backward", kind="reduce-scatter", dtype="float32", nbytes=16)]
        memory += [peak(at, blocks) + 30, peak(at, blocks) + 10]
    events.append(Event("update", kind="all-gather", dtype="float64", nbytes=8 * blocks))
    memory.append(130 * blocks)
    peaks = tuple((0, 0, 0, x, 0) for x in memory)
    return Counts(tuple(events), peaks, peaks)


@pytest.mark.parametrize("blocks", [6, 17, 90])
def test_few_blocks_tell_events_and_peak_of_many(blocks: int) -> None:
    """The peak is in the middle of few blocks, and in the update of many."""
    found = extrapolated(counts_of(FEW), counts_of(FEW + 1), blocks - FEW)
    assert found is not None
    counted = counts_of(blocks)
    assert found.events == counted.events
    assert found.peak == counted.peak
    assert (found.flops, found.traffic()) == (counted.flops, counted.traffic())


def test_blocks_that_change_others_are_not_extrapolated() -> None:
    few, more = counts_of(FEW), counts_of(FEW + 1)
    assert extrapolated(few, Counts(more.events[:-1], more.peaks[:-1], more.ends[:-1]), 3) is None


@pytest.mark.exhaustive
def test_a_deep_model_is_counted_as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("noise.digest", "backends.checksums"):  # their batches, up to 32 MiB, hold all of this model
        monkeypatch.setattr(f"dpshard.{place}._TOGETHER", 1)
    setup, more = Setup(model=MODEL, ranks=8, checkpointing=True), 3
    with fake_ranks(setup):
        few, next_one, deep = (
            Simulation(replace(setup, model=replace(MODEL, layers=n))) for n in (FEW, FEW + 1, FEW + more)
        )
        found = Extrapolation(few, next_one, more, pytest.fail)
        assert (found.elements, found.shard_elements) == (deep.elements, deep.shard_elements)
        for clipping in (None, Clipping("block-wise")):
            extrapolation, counted = found.count(clipping, 2), deep.count(clipping, 2)
            assert extrapolation.events == counted.events
            assert extrapolation.peak == pytest.approx(counted.peak, rel=1e-3)


def test_deep_models_alone_are_extrapolated() -> None:
    for layers, shard, kind in ((MANY, "fsdp2", Simulation), (MANY + 1, "fsdp2", Extrapolation)):
        setup = Setup(model=replace(MODEL, width=16, layers=layers), ranks=8, shard=shard)  # type: ignore[arg-type]
        with fake_ranks(setup):
            assert isinstance(rank_of(setup), kind)
