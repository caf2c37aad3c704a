"""Estimates of ordinary and private steps, and the largest micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpshard.applications.planner.counts import RECORDS, Counts, Traffic
from dpshard.applications.planner.depth import rank_of
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.simulation import Clipping, Setup, fake_ranks
from dpshard.applications.planner.timeline import Event, Times, replay, scaled, spread, update_bytes
from dpshard.config import is_count, require_positive
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
"""Upper limit of the search for micro-batches."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of one step of one rank; bytes are of tensors, without allocator and libraries."""

    clipping: Clipping | None
    """None for ordinary training."""
    flops: int
    """Operations of matrix products, convolutions and attention; a multiply-add is two."""
    traffic: dict[tuple[str, str], Traffic]
    """Collectives by (kind, dtype)."""
    parts: dict[str, int]
    """Bytes by part at peak memory."""
    largest_micro_batch: int | None = None
    """Largest micro-batch that fits the GPU; 0 if one sample does not fit, None without a search."""
    events: tuple[Event, ...] = ()
    """Products and collectives of the step."""
    largest_events: tuple[Event, ...] = ()
    """Those at the largest micro-batch."""

    @property
    def label(self) -> str:
        """Name for users."""
        if self.clipping is None:
            return "not private"
        passes = "one pass" if self.clipping.passes == 1 else "two passes"
        mode = "" if self.clipping.mode in ("auto", "mixed-ghost") else f" ({self.clipping.mode})"
        return f"{self.clipping.style}, {passes}{mode}"

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return sum(self.parts.values())

    def sent(self, kind: str) -> Traffic:
        """Return the collectives of one kind, over all dtypes."""
        found = [traffic for (name, _), traffic in self.traffic.items() if name == kind]
        return Traffic(sum(t.calls for t in found), sum(t.nbytes for t in found))


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `dpshard plan`."""

    setup: Setup
    micro_batch: int
    """Samples of a rank in one forward."""
    parameters: int
    gpu_memory: int | None
    """Bytes."""
    estimates: tuple[Estimate, ...]
    """Ordinary training first."""
    shard_elements: int = 0
    """Elements of the parameters that a rank stores."""
    positions: int = 1
    """Tokens of a sample; 1 for an image."""

    def spilled(self, estimate: Estimate) -> int:
        """Return the bytes of records that offload_records="auto" moves; all of them if the GPU is not known."""
        room = 0 if self.gpu_memory is None else (1 - RESERVE) * self.gpu_memory
        return min(estimate.parts[RECORDS], max(0, round(estimate.peak - room)))

    def times(self, estimate: Estimate, hardware: Hardware, *, micro_batch: int | None = None) -> Times:
        """Return the time of a step at `micro_batch`, by default the one that was counted.

        At the largest micro-batch its own counts are used; else products grow with the samples.
        """
        micro_batch = micro_batch or self.micro_batch
        if micro_batch == estimate.largest_micro_batch:
            events: Sequence[Event] = estimate.largest_events
        else:
            events = scaled(estimate.events, micro_batch / self.micro_batch)
        return self._replay(events, estimate, hardware)

    def times_on(self, estimate: Estimate, hardware: Hardware, ranks: int) -> Times:
        """Return the time of a step with as many samples a rank on another number of ranks."""
        return self._replay(spread(estimate.events, self.setup.ranks, ranks), estimate, hardware)

    def _replay(self, events: Sequence[Event], estimate: Estimate, hardware: Hardware) -> Times:
        moved = update_bytes(self.shard_elements, self.setup.optimizer, private=estimate.clipping is not None)
        return replay(events, hardware, self.setup.precision, update_bytes=moved)

    def rate(self, estimate: Estimate, hardware: Hardware, micro_batch: int | None = None) -> float:
        """Return tokens (images) a second and GPU at `micro_batch`."""
        samples = (micro_batch or self.micro_batch) * self.setup.micro_batches * self.setup.data_ranks
        seconds = self.times(estimate, hardware, micro_batch=micro_batch).total
        return samples * self.positions / seconds / self.setup.ranks

    @property
    def model_states(self) -> dict[str, float]:
        """Bytes per rank of parameters, gradients and Adam states by ZeRO stage, mixed precision.

        16 Psi, (4 + 12/N) Psi, (2 + 14/N) Psi, 16 Psi / N; Rajbhandari et al. 2020, Bu et al. 2023 Sec. 2.2.2.
        """
        return zero_model_states(self.parameters, self.setup.ranks)


def zero_model_states(parameters: int, ranks: int) -> dict[str, float]:
    """Return Plan.model_states."""
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

    With `gpu_memory` (GiB) find the largest micro-batch that fits. `report` gets the name of each count. Raises
    ConfigurationError for an unknown model, an impossible mesh, or within a process group.
    """
    for name, value in (("ranks", setup.ranks), ("micro_batch", micro_batch), ("micro_batches", setup.micro_batches)):
        if not is_count(value):
            raise ConfigurationError(f"{name}={value!r}: give a count, at least 1.")
    if setup.ranks < 2:
        raise ConfigurationError(f"ranks={setup.ranks}: a plan needs at least 2 ranks.")
    limit = None
    if gpu_memory is not None:
        require_positive("gpu_memory", gpu_memory)
        limit = round(gpu_memory * GIB)
    estimates = []
    report("building the model")
    with fake_ranks(setup):
        simulation = rank_of(setup)
        for clipping in (None, *clippings):
            empty = Estimate(clipping, 0, {}, {})
            report(f"{empty.label}, micro-batch {micro_batch}")
            counts = simulation.count(clipping, micro_batch)
            found = Estimate(clipping, counts.flops, counts.traffic(), counts.parts(), events=counts.events)
            if limit is not None:
                tried = {micro_batch: counts}

                def peak(
                    batch: int,
                    clipping: Clipping | None = clipping,
                    label: str = found.label,
                    tried: dict[int, Counts] = tried,
                ) -> int:
                    report(f"{label}, micro-batch {batch}")
                    tried[batch] = simulation.count(clipping, batch)
                    return tried[batch].peak

                largest = largest_micro_batch(peak, limit, (micro_batch, found.peak))
                events = tried[largest].events if largest else ()
                found = replace(found, largest_micro_batch=largest, largest_events=events)
            estimates.append(found)
        return Plan(
            setup,
            micro_batch,
            simulation.elements,
            limit,
            tuple(estimates),
            shard_elements=simulation.shard_elements,
            positions=simulation.positions,
        )


def largest_micro_batch(peak: Callable[[int], int], limit: int, known: tuple[int, int]) -> int:
    """Return the largest B with peak(B) <= limit, or 0; `known` is one pair (B, peak).

    Peaks grow nearly linearly in B, perhaps beyond a plateau. So lines through two values find B in a few counts.
    """
    points, width = [known], LARGEST
    fits, exceeds = (known[0], LARGEST) if known[1] <= limit else (0, known[0])
    while exceeds - fits > 1:
        middle = 2 * fits if exceeds == LARGEST else (fits + exceeds) // 2
        guess = middle if len(points) == 1 else _where(limit, points, 8 * fits)
        if guess != fits and 2 * (exceeds - fits) > width:  # the last count did not halve the range
            guess = middle
        guess = min(max(guess, fits + 1), exceeds - 1, 8 * fits or exceeds)
        width = exceeds - fits if exceeds < LARGEST else 2 * LARGEST
        points.append((guess, peak(guess)))
        fits, exceeds = (guess, exceeds) if points[-1][1] <= limit else (fits, guess)
    return fits


def _where(limit: int, points: list[tuple[int, int]], otherwise: int) -> int:
    """Return where a line through two of the points meets the limit; `otherwise` if it does not rise."""
    above = sorted(point for point in points if point[1] > limit)[:2]
    # A point on the plateau gives a wrong slope.
    (first, low), (last, high) = above if len(above) == 2 else sorted(points[-2:])
    slope = (high - low) / (last - first)
    return int(last + (limit - high) / slope) if slope > 0 else otherwise
