"""Estimates of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpshard.applications.planner.counts import RECORDS, Counts, Traffic
from dpshard.applications.planner.extrapolation import Extrapolation, rank_of
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.simulation import Clipping, Setup, Simulation, fake_ranks, require_counts
from dpshard.applications.planner.timeline import Event, Times, replay, scaled, spread, update_bytes
from dpshard.config import require_positive
from dpshard.errors import ConfigurationError
from dpshard.records.offload import RESERVE

GIB = 2**30

DEFAULT_CLIPPINGS = (
    Clipping("all-layer"),
    Clipping("all-layer", "mixed-ghost"),
    Clipping("block-wise"),
    Clipping("layer-wise"),
)

LARGEST = 2**16


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of one step of one rank; bytes are of tensors."""

    clipping: Clipping | None
    flops: int
    """A multiply-add is two."""
    traffic: dict[tuple[str, str], Traffic]
    parts: dict[str, int]
    largest_micro_batch: int | None = None
    """0 if none fits, None without a search."""
    events: tuple[Event, ...] = ()
    largest_events: tuple[Event, ...] = ()

    @property
    def label(self) -> str:
        """Name for users."""
        return label_of(self.clipping)

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return sum(self.parts.values())

    def sent(self, kind: str) -> Traffic:
        """Return the collectives of one kind."""
        found = [traffic for (name, _), traffic in self.traffic.items() if name == kind]
        return Traffic(sum(t.calls for t in found), sum(t.nbytes for t in found))


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `dpshard plan`."""

    setup: Setup
    micro_batch: int
    parameters: int
    gpu_memory: int | None
    estimates: tuple[Estimate, ...]
    """Ordinary training first."""
    shard_elements: int = 0
    positions: int = 1

    def spilled(self, estimate: Estimate) -> int:
        """Return the bytes that offload_records="auto" moves, without a known GPU all."""
        room = 0 if self.gpu_memory is None else (1 - RESERVE) * self.gpu_memory
        return min(estimate.parts[RECORDS], max(0, round(estimate.peak - room)))

    def host_gib(self, estimate: Estimate) -> float:
        """Return the GiB of records in a host's memory."""
        return self.setup.node * self.spilled(estimate) / GIB

    def times(self, estimate: Estimate, hardware: Hardware, *, micro_batch: int | None = None) -> Times:
        """Return the time of a step; other micro-batches than those counted scale its products."""
        micro_batch = micro_batch or self.micro_batch
        if micro_batch == estimate.largest_micro_batch:
            events: Sequence[Event] = estimate.largest_events
        else:
            events = scaled(estimate.events, micro_batch / self.micro_batch)
        return self._replay(events, estimate, hardware)

    def times_on(self, estimate: Estimate, hardware: Hardware, ranks: int) -> Times:
        """Return the time on other `ranks`."""
        return self._replay(spread(estimate.events, self.setup.ranks, ranks), estimate, hardware)

    def _replay(self, events: Sequence[Event], estimate: Estimate, hardware: Hardware) -> Times:
        moved = update_bytes(self.shard_elements, self.setup.optimizer, private=estimate.clipping is not None)
        return replay(events, hardware, self.setup.precision, update_bytes=moved)

    def rate(self, estimate: Estimate, hardware: Hardware, micro_batch: int | None = None) -> float:
        """Return tokens (images) a second and GPU."""
        samples = (micro_batch or self.micro_batch) * self.setup.micro_batches * self.setup.data_ranks
        seconds = self.times(estimate, hardware, micro_batch=micro_batch).total
        return samples * self.positions / seconds / self.setup.ranks


def label_of(clipping: Clipping | None) -> str:
    """Return a name for users."""
    if clipping is None:
        return "not private"
    passes = "one pass" if clipping.passes == 1 else "two passes"
    mode = "" if clipping.mode in ("auto", "mixed-ghost") else f" ({clipping.mode})"
    return f"{clipping.style}, {passes}{mode}"


def zero_model_states(parameters: int, ranks: int) -> dict[str, float]:
    """Return bytes of a rank by ZeRO stage: Rajbhandari et al. 2020."""
    return {
        "stage 0 (DDP)": 16.0 * parameters,
        "stage 1": (4 + 12 / ranks) * parameters,
        "stage 2": (2 + 14 / ranks) * parameters,
        "stage 3 (FSDP)": 16 / ranks * parameters,
    }


def make_plan(
    setup: Setup,
    *,
    micro_batch: int = 1,
    clippings: Sequence[Clipping] = DEFAULT_CLIPPINGS,
    gpu_memory: float | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Count a step of ordinary training, and one per item of `clippings`, on one rank of `setup`.

    `gpu_memory` (GiB) adds the largest micro-batch. Raises ConfigurationError for an unknown model, an impossible mesh,
    or within a process group.
    """
    require_counts(ranks=setup.ranks, micro_batch=micro_batch, micro_batches=setup.micro_batches)
    if setup.ranks < 2:
        raise ConfigurationError(f"ranks={setup.ranks}: a plan needs at least 2 ranks.")
    limit = None
    if gpu_memory is not None:
        require_positive("gpu_memory", gpu_memory)
        limit = round(gpu_memory * GIB)
    report("building the model")
    with fake_ranks(setup):
        rank = rank_of(setup)
        estimates = tuple(_estimate(rank, clipping, micro_batch, limit, report) for clipping in (None, *clippings))
    return Plan(setup, micro_batch, rank.elements, limit, estimates, rank.shard_elements, rank.positions)


def _estimate(
    rank: Simulation | Extrapolation,
    clipping: Clipping | None,
    micro_batch: int,
    limit: int | None,
    report: Callable[[str], None],
) -> Estimate:
    tried: dict[int, Counts] = {}

    def peak(batch: int) -> int:
        report(f"{label_of(clipping)}, micro-batch {batch}")
        tried[batch] = rank.count(clipping, batch)
        return tried[batch].peak

    known = micro_batch, peak(micro_batch)
    largest = None if limit is None else largest_micro_batch(peak, limit, known)
    counts, events = tried[micro_batch], tried[largest].events if largest else ()
    return Estimate(clipping, counts.flops, counts.traffic(), counts.parts(), largest, counts.events, events)


def largest_micro_batch(peak: Callable[[int], int], limit: int, known: tuple[int, int]) -> int:
    """Return the largest B with peak(B) <= limit, or 0; `known` is one pair (B, peak).

    Peaks are nearly linear, perhaps beyond a plateau.
    """
    points, width = [known], LARGEST
    fits, exceeds = (known[0], LARGEST) if known[1] <= limit else (0, known[0])
    while exceeds - fits > 1:
        middle = 2 * fits if exceeds == LARGEST else (fits + exceeds) // 2
        guess = middle if len(points) == 1 else _where(limit, points, 8 * fits)
        if guess != fits and 2 * (exceeds - fits) > width:  # halve a range that the last count did not
            guess = middle
        guess = min(max(guess, fits + 1), exceeds - 1, 8 * fits or exceeds)
        width = exceeds - fits if exceeds < LARGEST else 2 * LARGEST
        points.append((guess, peak(guess)))
        fits, exceeds = (guess, exceeds) if points[-1][1] <= limit else (fits, guess)
    return fits


def _where(limit: int, points: list[tuple[int, int]], otherwise: int) -> int:
    above = sorted(point for point in points if point[1] > limit)[:2]
    (first, low), (last, high) = above if len(above) == 2 else sorted(points[-2:])
    slope = (high - low) / (last - first)
    return int(last + (limit - high) / slope) if slope > 0 else otherwise
