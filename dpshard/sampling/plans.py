"""Draw logical batches, and divide them into micro-batches of one size on every rank.

A step draws each sample independently with probability q = (expected batch size) / N: Poisson sampling. A cap then
keeps a uniform subset. The accountant relies on exactly this. Every rank makes the same keyed draw and takes its slice.
All ranks have K micro-batches, so none waits in a collective. K is at least 1, because an empty logical batch is a
release, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.config import BatchSchedule, is_count, require_choice
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource, derive_key


@dataclass(frozen=True)
class PoissonSampler:
    """The logical batch of every step, as a function of secret and step."""

    sample_size: int
    schedule: BatchSchedule
    secret: bytes = field(repr=False)
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.sample_size < max(self.schedule.sizes):
            raise ConfigurationError(
                f"sample_size={self.sample_size} is less than the largest expected batch size, "
                f"{max(self.schedule.sizes)}: choose smaller batches."
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size={self.max_batch_size}: a cap is at least 1, or None.")

    def probability(self, step: int) -> float:
        """Return the probability of each sample in `step`, before the cap."""
        return self.schedule[step] / self.sample_size

    def draw(self, step: int) -> NDArray[np.int64]:
        """Return the sorted distinct indices [n] of the logical batch of `step`, in O(q N).

        Above `max_batch_size`, keep a uniformly random subset of that size.
        """
        source = RandomSource(derive_key(self.secret, "sample", step))
        indices = bernoulli_indices(self.sample_size, self.probability(step), source.uniform)
        cap = self.max_batch_size
        if cap is None or len(indices) <= cap:
            return indices
        # The `cap` smallest of independent uniforms are a uniform subset.
        kept = np.argpartition(source.uniform(len(indices)), cap - 1)[:cap]
        return indices[np.sort(kept)]


def default_cap(batch_size: int) -> int:
    """Return the cap ceil(B + 6 sqrt(B)), at least six standard deviations above the mean."""
    return math.ceil(batch_size + 6 * math.sqrt(batch_size))


def parse_cap(max_batch_size: int | Literal["auto"] | None, schedule: BatchSchedule) -> int | None:
    """Return the cap of logical batches; warn if most reach it."""
    expected = max(schedule.sizes)
    cap = default_cap(expected) if max_batch_size == "auto" else max_batch_size
    if type(cap) is int and 0 < cap < expected:
        warnings.warn(
            f"max_batch_size={cap} is below the expected batch size {expected}: most batches are cut, but still "
            f"divided by the expected size, so updates shrink. Choose a larger cap, or smaller batches.",
            stacklevel=3,
        )
    return cap


def bernoulli_indices(n: int, q: float, uniform: Callable[[int], NDArray[np.float64]]) -> NDArray[np.int64]:
    """Return successes among `n` trials of probability `q`, by jumps of floor(log u / log(1 - q)) failures.

    For u uniform in (0, 1] the jump is geometric (Devroye 1986, "Non-uniform random variate generation", X.2).
    """
    if q >= 1:
        return np.arange(n, dtype=np.int64)
    expected = n * q
    runs, last = [], -1
    while last < n:
        jumps = np.floor(np.log(uniform(int(expected + 6 * math.sqrt(expected)) + 16)) / math.log1p(-q))
        # Any jump past the end has the same effect as n, which fits into an integer.
        runs.append(last + np.cumsum(np.minimum(jumps, n).astype(np.int64) + 1))
        last = int(runs[-1][-1])
    indices = np.concatenate(runs)
    return indices[: np.searchsorted(indices, n)]


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """The samples of one rank in one micro-batch."""

    step: int
    position: int
    """Index in the logical batch."""
    count: int
    """Micro-batches K, equal on all ranks."""
    indices: list[int]
    """Indices of the B samples; padding repeats one."""
    is_padding: Tensor
    """Bool [B]: samples at the end that must contribute exactly 0."""
    min_samples_per_rank: int
    """Least number of samples on any rank."""
    rows_key: bytes = field(default=b"", repr=False)
    """Key that draws the rows of a unit."""
    rows_per_unit: int = 1
    """Consecutive rows per sample."""
    placement: Any = None
    """Places of units in packed rows (packing.Placement), or None."""

    @cached_property
    def samples(self) -> int:
        """Number of samples that are not padding."""
        return int((~self.is_padding).sum())

    def chunk(self, index: int, count: int) -> MicroBatchPlan:
        """Return part `index` of `count` equal parts; the samples must be a multiple of `count`."""
        size = len(self.indices) // count
        first = index * size
        most = min(max(self.min_samples_per_rank - first, 0), size)
        indices, is_padding = self.indices[first : first + size], self.is_padding[first : first + size]
        return replace(self, indices=indices, is_padding=is_padding, min_samples_per_rank=most)

    @property
    def rows_are_padding(self) -> Tensor:
        """Bool [B * rows_per_unit]: rows that are padding."""
        return self.is_padding_on(torch.device("cpu"), self.rows_per_unit)

    def is_padding_on(self, device: torch.device, rows_each: int = 1) -> Tensor:
        """Return `is_padding` with every element `rows_each` times, made on `device` because a copy would wait."""
        if device.type == "cpu" and rows_each == 1:
            return self.is_padding
        return torch.arange(len(self.is_padding) * rows_each, device=device) >= self.samples * rows_each


def plan_micro_batches(
    indices: Sequence[int] | NDArray[np.int64],
    step: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    pad: bool = True,
    rows_per_unit: int = 1,
    rows_key: bytes = b"",
) -> list[MicroBatchPlan]:
    """Return the K micro-batches of `rank`, given the `indices` of the one global draw of `step`.

    K = max(1, ceil(n / (micro_batch_size * world_size))). Each index is in one row of one rank; ranks differ by at most
    one sample. Without `pad`, only an empty micro-batch has a padding row.
    """
    require_micro_batch_size(micro_batch_size)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank={rank} is not one of the {world_size} ranks.")
    drawn = np.asarray(indices, dtype=np.int64)
    count = max(1, math.ceil(len(drawn) / (micro_batch_size * world_size)))
    own = drawn[rank::world_size]
    # The rank has just read its own last sample, so it is cheap.
    filler = own[-1] if len(own) else drawn[0] if len(drawn) else 0
    rows_KB = np.full((count, micro_batch_size), filler, dtype=np.int64)
    rows_KB.reshape(-1)[: len(own)] = own
    is_padding_KB = torch.arange(rows_KB.size, device="cpu").view(count, micro_batch_size) >= len(own)
    least, B = len(drawn) // world_size, micro_batch_size
    plans = []
    for position, (row_B, is_padding_B) in enumerate(zip(rows_KB.tolist(), is_padding_KB, strict=True)):
        rows = B if pad else max(1, min(len(own) - position * B, B))
        everywhere = min(max(least - position * B, 0), B)
        own_B, padding_B = row_B[:rows], is_padding_B[:rows]
        plans.append(MicroBatchPlan(step, position, count, own_B, padding_B, everywhere, rows_key, rows_per_unit))
    return plans


class Sampler(Protocol):
    """Logical batches of a run."""

    def draw(self, step: int) -> NDArray[np.int64]:
        """Return the distinct indices [n] of the logical batch of `step`, the same on every rank and at every call."""
        ...


def plan_steps(
    sampler: Sampler,
    secret: bytes,
    steps: Iterable[int],
    micro_batch_size: int | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    pad: bool = True,
    rows_per_unit: int = 1,
    pack: Callable[..., Sequence[MicroBatchPlan]] | None = None,
) -> Iterator[MicroBatchPlan]:
    """Yield the micro-batches of `rank` in `steps`; with `micro_batch_size` None, one per logical batch.

    `pack` plans packed rows, in place of `plan_micro_batches`.
    """
    for step in steps:
        drawn = sampler.draw(step)
        if pack is not None:
            yield from pack(drawn, step, micro_batch_size, rank, world_size)
            continue
        size = micro_batch_size or max(1, math.ceil(len(drawn) / world_size))
        of_units = {"rows_per_unit": rows_per_unit, "rows_key": derive_key(secret, "rows of units", step)}
        yield from plan_micro_batches(drawn, step, size, rank, world_size, pad=pad, **of_units)


def require_micro_batch_size(size: int) -> None:
    """Raise ConfigurationError unless `size` is a positive int."""
    if not is_count(size):
        raise ConfigurationError(f"micro_batch_size={size!r}: it must be an int, at least 1.")


def require_feed(micro_batch_size: int | None, steps: int | None, *, pad: bool, rows_per_unit: int) -> None:
    """Raise ConfigurationError unless `engine.batches` supports these options together."""
    if micro_batch_size is not None:
        require_micro_batch_size(micro_batch_size)
    require_choice("pad", pad, (False, True))
    if not pad and rows_per_unit > 1:
        raise ConfigurationError(
            f"pad=False is for loops that change the order of rows, but the {rows_per_unit} rows of a unit must stay "
            f"side by side. Leave it out, and augment in the data set or in collate_fn."
        )
    if steps is not None and not is_count(steps):
        raise ConfigurationError(f"steps={steps!r}: give a number of logical batches, at least 1, or None.")
