"""Divide a logical batch into micro-batches of one size on every rank.

[Note: From a step to micro-batches]
Sample i is in the logical batch of a step with probability q = (expected batch size) / N, independently of all others.
The accountant relies on exactly this. Every rank makes the same keyed draw and takes its slice. All ranks agree on K
micro-batches of B rows, so no rank waits for another in a collective. A mask marks the padding rows, which contribute
exactly 0. An empty logical batch is a release like any other, because its noise counts; hence K is at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.config import BatchSchedule, check_choice, is_count
from dpshard.errors import ConfigurationError
from dpshard.randomness import derive_key
from dpshard.sampling.draw import PoissonSampler


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """The samples of one rank in one micro-batch."""

    step: int
    """Step of the logical batch."""
    position: int
    """Index in the logical batch, 0 to count - 1."""
    count: int
    """Number of micro-batches K, equal on all ranks."""
    indices: list[int]
    """Indices of the B samples; padding repeats a sample of the batch."""
    is_padding: Tensor
    """Bool [B]: samples that must contribute exactly 0, at the end."""
    samples_everywhere: int
    """Least number of samples on any rank; equal on all ranks."""
    rows_key: bytes = field(default=b"", repr=False)
    """Key that draws the rows of a unit."""
    rows_per_unit: int = 1
    """Consecutive rows per sample; the micro-batch has B times as many. See [Note: Units] in interception/run.py."""

    @cached_property
    def samples(self) -> int:
        """Number of samples that are not padding."""
        return int((~self.is_padding).sum())

    @property
    def rows_are_padding(self) -> Tensor:
        """Bool [B * rows_per_unit]: rows that are padding."""
        return self.is_padding_on(torch.device("cpu"), self.rows_per_unit)

    def is_padding_on(self, device: torch.device, rows_each: int = 1) -> Tensor:
        """Return `is_padding` with every element `rows_each` times, made on `device`: a copy would wait for it."""
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

    K = max(1, ceil(n / (micro_batch_size * world_size))) on every rank. Each index is in exactly one row of one rank,
    and ranks differ by at most one sample. Without `pad`, only an empty micro-batch has a padding row. Raises
    ConfigurationError for impossible sizes.
    """
    check_micro_batch_size(micro_batch_size)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank={rank} is not one of the {world_size} ranks.")
    drawn = np.asarray(indices, dtype=np.int64)
    count = max(1, math.ceil(len(drawn) / (micro_batch_size * world_size)))
    own = drawn[rank::world_size]
    # Prefer the rank's own last sample, which was just read.
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


class Sampled(Protocol):
    """The facts of a mechanism that determine sampling."""

    @property
    def sample_size(self) -> int:
        """Number of samples of the data set."""
        ...

    @property
    def schedule(self) -> BatchSchedule:
        """Expected batch size of every step."""
        ...

    @property
    def max_batch_size(self) -> int | None:
        """Cap of a logical batch."""
        ...


def poisson_plans(
    mechanism: Sampled,
    secret: bytes,
    steps: Iterable[int],
    micro_batch_size: int | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    pad: bool = True,
    rows_per_unit: int = 1,
) -> Iterator[MicroBatchPlan]:
    """Yield the micro-batches of `rank` in `steps`; with `micro_batch_size` None, one per logical batch."""
    sampler = PoissonSampler(mechanism.sample_size, mechanism.schedule, secret, max_batch_size=mechanism.max_batch_size)
    for step in steps:
        drawn = sampler.draw(step)
        size = micro_batch_size or max(1, math.ceil(len(drawn) / world_size))
        of_units = {"rows_per_unit": rows_per_unit, "rows_key": derive_key(secret, "rows of units", step)}
        yield from plan_micro_batches(drawn, step, size, rank, world_size, pad=pad, **of_units)


def check_micro_batch_size(size: int) -> None:
    """Raise ConfigurationError unless `size` is a positive int."""
    if not is_count(size):
        raise ConfigurationError(f"micro_batch_size={size!r}: it must be an int, at least 1.")


def check_feed(micro_batch_size: int | None, steps: int | None, *, pad: bool, rows_per_unit: int) -> None:
    """Raise ConfigurationError unless logical batches can be fed like this; see `engine.batches`."""
    if micro_batch_size is not None:
        check_micro_batch_size(micro_batch_size)
    check_choice("pad", pad, (False, True))
    if not pad and rows_per_unit > 1:
        raise ConfigurationError(
            f"pad=False is for loops that change the order of rows, but the {rows_per_unit} rows of a unit must stay "
            f"side by side. Leave it out, and augment in the data set or in collate_fn."
        )
    if steps is not None and not is_count(steps):
        raise ConfigurationError(f"steps={steps!r}: give a number of logical batches, at least 1, or None.")
