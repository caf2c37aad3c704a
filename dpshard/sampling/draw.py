"""Draw the logical batch of a step by Poisson sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource, derive_key


@dataclass(frozen=True)
class PoissonSampler:
    """The logical batch of every step, as a function of secret and step."""

    sample_size: int
    """Number of samples N of the data set."""
    schedule: BatchSchedule
    """Expected batch size of every step; divided by N, the sampling probability."""
    secret: bytes = field(repr=False)
    """Run secret, 32 bytes."""
    max_batch_size: int | None = None
    """Cap of a truncated Poisson batch, or None."""

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
        """Return sorted distinct indices [n] of the logical batch of `step`; time and memory O(q N), never O(N).

        If more than `max_batch_size` samples are drawn, keep a uniformly random subset of that size.
        """
        source = RandomSource(derive_key(self.secret, "sample", step))
        indices = _bernoulli_indices(self.sample_size, self.probability(step), source.uniform)
        cap = self.max_batch_size
        if cap is None or len(indices) <= cap:
            return indices
        # The samples with the `cap` smallest of independent uniforms are a uniform subset.
        kept = np.argpartition(source.uniform(len(indices)), cap - 1)[:cap]
        return indices[np.sort(kept)]


def default_cap(batch_size: int) -> int:
    """Return the cap ceil(B + 6 sqrt(B)): at least six standard deviations above the mean, so epsilon grows little."""
    return math.ceil(batch_size + 6 * math.sqrt(batch_size))


def parse_cap(max_batch_size: int | Literal["auto"] | None, schedule: BatchSchedule) -> int | None:
    """Return the cap of logical batches; warn if most reach it: accounting stays right, but updates shrink."""
    expected = max(schedule.sizes)
    cap = default_cap(expected) if max_batch_size == "auto" else max_batch_size
    if type(cap) is int and 0 < cap < expected:
        warnings.warn(
            f"max_batch_size={cap} is below the expected batch size {expected}: most batches are cut, but still "
            f"divided by the expected size, so updates shrink. Choose a larger cap, or smaller batches.",
            stacklevel=3,
        )
    return cap


def _bernoulli_indices(n: int, q: float, uniform: Callable[[int], NDArray[np.float64]]) -> NDArray[np.int64]:
    """Return successes among `n` trials of probability `q`, by jumps of floor(log u / log(1 - q)) failures.

    Devroye 1986, "Non-uniform random variate generation", X.2: for u uniform in (0, 1] the jump is geometric.
    """
    if q >= 1:
        return np.arange(n, dtype=np.int64)
    expected = n * q
    runs, last = [], -1
    while last < n:
        jumps = np.floor(np.log(uniform(int(expected + 6 * math.sqrt(expected)) + 16)) / math.log1p(-q))
        # Any jump past the end has the same effect; n fits into an integer.
        runs.append(last + np.cumsum(np.minimum(jumps, n).astype(np.int64) + 1))
        last = int(runs[-1][-1])
    indices = np.concatenate(runs)
    return indices[: np.searchsorted(indices, n)]
