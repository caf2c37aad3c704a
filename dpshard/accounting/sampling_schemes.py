"""How the steps of a run compose: a release is one step, one turn of a group, or the run.

[Note: Ways to sample]
- "poisson": every step draws each sample with probability B / N, and is a release.
- "fixed-order": a sample is in at most one of any floor(N / B) consecutive steps. The run is one Gaussian release.
- "cyclic-poisson": step t draws each sample of group t mod b with probability b B / N, b the bands of C. Each of the
  ceil(T / b) turns is a Poisson-sampled release (arXiv:2306.08153).
- "balls-in-bins": every sample is in one random step of each epoch, which is a release. With correlated noise it is the
  same step in all epochs, and the run is one release.

A run may go back and continue with other sums and independent noise. The tree of its steps is one Gaussian mechanism.
Let D_n be the sensitivity of the first n rows. That of the tree is the root of the sum of D_n squared over the leaves.
A `Span` begins where a release does not follow the last one. So a span ends with each leaf, or later. In cyclic
sampling, window r lies in the steps [r b, (r + 2) b). With rows of k spans it costs as much as with sigma / sqrt(k).
docs/accounting.md has the proofs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np

from dpshard.accounting.releases import SIMULATION_FAILURE, Release
from dpshard.accounting.spans import Span, by_run, total_cost
from dpshard.noise.correlation import Correlation, Series, sensitivities

MOST_BINS = 2**14
"""Largest epoch of CorrelatedBins: with more steps, the simulation would draw too few losses."""


class SamplingScheme(Protocol):
    """The composition of the steps of a run into releases other than one per step."""

    open_ended: ClassVar[bool]
    """True if there may be more steps than planned."""

    @property
    def release(self) -> Release:
        """The release that a step is part of."""
        ...

    @property
    def steps(self) -> int:
        """Planned steps."""
        ...

    @property
    def sensitivity(self) -> float:
        """Largest change of C S by a sample with contributions of norm 1, in the run or in one window."""
        ...

    def cost(self, spans: Iterable[Span]) -> Counter[Release]:
        """Return the releases that these steps of one run cost together."""
        ...

    def in_words(self, steps: int) -> str:
        """Describe the release of `steps` steps."""
        ...


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """The whole run is one Gaussian release."""

    release: Release
    steps: int
    correlation: Correlation
    separation: int
    """Smallest distance between two steps with the same sample."""
    open_ended: ClassVar[bool] = False

    @property
    def sensitivity(self) -> float:
        """See SamplingScheme."""
        return float(self._sensitivities[-1])

    @property
    def _sensitivities(self) -> Series:
        return sensitivities(self.correlation, self.steps, self.separation)

    def cost(self, spans: Iterable[Span]) -> Counter[Release]:
        """Return the releases that these steps cost together: one Gaussian release."""
        ends, moved = [span.stop for span in spans], self._sensitivities
        if not ends:
            return Counter()
        whole = math.sqrt(sum((moved[min(end, self.steps) - 1] / moved[-1]) ** 2 for end in ends))
        return Counter([replace(self.release, noise_multiplier=self.release.noise_multiplier / whole)])

    def in_words(self, steps: int) -> str:
        """See SamplingScheme."""
        return f"one Gaussian release of {steps} sums over batches in a fixed order{_noise(self.correlation)}"


@dataclass(frozen=True, slots=True)
class CyclicPoisson:
    """A Poisson-sampled release for every turn of a group."""

    release: Release
    steps: int
    correlation: Correlation
    open_ended: ClassVar[bool] = False

    @property
    def sensitivity(self) -> float:
        """See SamplingScheme."""
        return float(sensitivities(self.correlation, self.steps, self.steps)[-1])

    def cost(self, spans: Iterable[Span]) -> Counter[Release]:
        """Return the releases that these steps cost together: one per turn."""
        ends = [(span.start, span.stop) for span in spans]
        turns = math.ceil(max((stop for _, stop in ends), default=0) / self.correlation.bands)
        if len(ends) <= 1:
            return Counter({self.release: turns} if turns else {})
        total: Counter[int] = Counter()
        for turn in range(turns):
            first, last = turn * self.correlation.bands, (turn + 2) * self.correlation.bands
            total[max(1, sum(start < last and stop > first for start, stop in ends))] += 1
        sigma = self.release.noise_multiplier
        return Counter({replace(self.release, noise_multiplier=sigma / math.sqrt(k)): n for k, n in total.items()})

    def in_words(self, steps: int) -> str:
        """See SamplingScheme."""
        turns = math.ceil(steps / self.correlation.bands)
        return (
            f"{steps} releases ({turns} turns of every group) under cyclic Poisson sampling{_noise(self.correlation)}"
        )


@dataclass(frozen=True, slots=True)
class CorrelatedBins:
    """Balls in bins with correlated noise: the whole run is one release, and simulation gives its losses."""

    noise_multiplier: float
    sample_size: int
    steps: int
    correlation: Correlation
    epoch_steps: int
    open_ended: ClassVar[bool] = False

    @property
    def release(self) -> Release:
        """The release that all steps are part of."""
        overlaps = _circle(self.correlation, self.steps, self.epoch_steps)[1]
        return Release(
            self.noise_multiplier, 1.0, self.sample_size, allocated_steps=self.epoch_steps, overlaps=overlaps
        )

    @property
    def sensitivity(self) -> float:
        """See SamplingScheme."""
        return _circle(self.correlation, self.steps, self.epoch_steps)[0]

    def cost(self, spans: Iterable[Span]) -> Counter[Release]:
        """See SamplingScheme. The first steps cost as much as the run."""
        branches = sum(1 for _ in spans)
        if not branches:
            return Counter()
        return Counter([replace(self.release, noise_multiplier=self.noise_multiplier / math.sqrt(branches))])

    def in_words(self, steps: int) -> str:
        """See SamplingScheme."""
        return (
            f"one release of {steps} sums, with every sample in one random step of {self.epoch_steps}, the same in "
            f"each epoch (balls in bins){_noise(self.correlation)}; delta includes {SIMULATION_FAILURE:g} for a "
            f"failure of the public simulation that bounds the loss"
        )


@lru_cache(maxsize=16)
def _circle(correlation: Correlation, steps: int, epoch_steps: int) -> tuple[float, tuple[float, ...]]:
    """Return sensitivity and overlaps of [Note: Bins on a circle] in simulation.py."""
    epochs = math.ceil(steps / epoch_steps)
    column = np.abs(correlation.strategy(steps))
    with np.errstate(over="ignore", invalid="ignore"):
        covariance = np.fft.irfft(np.abs(np.fft.rfft(column, epochs * epoch_steps)) ** 2, epochs * epoch_steps)
        by_distance = epochs * covariance.reshape(epochs, epoch_steps).sum(0)
    if not math.isfinite(by_distance[0]):
        sensitivities(correlation, steps, epoch_steps)  # raises
    overlaps = by_distance[: epoch_steps // 2 + 1] / by_distance[0]
    # Rounded, because further digits depend on the processor, and a resumed run must have equal releases.
    rounded = np.clip(np.round(overlaps, 6) + 1e-6, 0.0, 1.0)
    return math.sqrt(by_distance[0]), (1.0, *rounded[1:].tolist())


def _noise(correlation: Correlation) -> str:
    name = type(correlation).__name__
    return "" if correlation.bands == 1 else f", with noise correlated by {name}(bands={correlation.bands})"


def cost_of(spans: Iterable[Span], scheme: SamplingScheme | None) -> Counter[Release]:
    """Return the releases that all `spans` cost, for runs of this scheme."""
    if scheme is None:
        return total_cost(spans)
    return sum(map(scheme.cost, by_run(spans)), Counter())
