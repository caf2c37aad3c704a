"""Runs whose noise is correlated over steps: their releases, as accounting takes them, and their error.

[Note: Two ways to sample under correlated noise]
The releases of a run are W (C S + Z), where C S + Z is one Gaussian mechanism ([Note: A run as one Gaussian
mechanism] in noise/correlation.py). Neighbours are zero-out: a sample that contributes nothing keeps its place in the
order. (Without it, all samples behind would move.)
- "fixed-order": a sample is in at most one of any b = floor(N / B) consecutive steps. Such orders are those that every
  epoch repeats, with or without its last, smaller batch, and those that go round. No sampling amplifies. The run is one
  Gaussian release, of the sensitivity of C under that separation.
- "cyclic-poisson": the samples are in b groups, b the bands of C. Step t draws each sample of group t mod b with
  probability b B / N. Columns of C at a distance of b have no row in common. So the rows of C S + Z fall into windows
  of b steps, one for each of the ceil(T / b) turns of the sample's group. In each window the sample contributes with
  probability b B / N, independently of all others, along one column, of norm at most |c|. So a window is a
  Poisson-sampled Gaussian, and the run composes them (Choquette-Choo et al. 2023, arXiv:2306.08153).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dpshard.accounting.releases import Counts, Release
from dpshard.config import BatchSchedule, check_choice
from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF, prefix_error, sensitivity

CorrelatedSampling = Literal["fixed-order", "cyclic-poisson"]
"""The ways to sample; see [Note: Two ways to sample under correlated noise]."""

INDEPENDENT = BandedInverse(bands=1)
"""Noise without correlation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelatedMechanism:
    """Noisy sums whose noise is correlated over the steps of the planned run."""

    noise_multiplier: float = math.nan
    """Standard deviation of z over max_grad_norm times `sensitivity`, >= 0. NaN before `calibrate` finds it."""
    schedule: BatchSchedule
    """Logical batch sizes, expected or exact: one size in all steps."""
    sample_size: int
    """Number of samples of the data set; public."""
    sampling: CorrelatedSampling
    """How the samples of a step are found."""
    correlation: BandedInverse | BandMF = INDEPENDENT
    """The correlation of the noise; by default there is none."""

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, get_args(CorrelatedSampling))
        if len(set(self.schedule.sizes)) != 1:
            raise ConfigurationError(
                f"sampling={self.sampling!r} needs one batch size in all steps: the number of steps between two "
                f"participations of a sample follows from it. Give batch_size as an int."
            )
        if self.sampling == "cyclic-poisson":
            self._check_groups()

    def _check_groups(self) -> None:
        if not isinstance(self.correlation, BandMF):
            raise ConfigurationError(
                f"sampling='cyclic-poisson' needs BandMF(bands=...), whose columns end after their bands; those of "
                f"{type(self.correlation).__name__} never end. Take BandMF, or sampling='fixed-order'."
            )
        if self.correlation.bands * self.schedule[0] > self.sample_size:
            raise ConfigurationError(
                f"sampling='cyclic-poisson': BandMF(bands={self.correlation.bands}) makes groups of "
                f"{self.sample_size / self.correlation.bands:g} samples, fewer than batch_size={self.schedule[0]}. "
                f"Take at most {self.sample_size // self.schedule[0]} bands, or smaller batches."
            )

    @property
    def sensitivity(self) -> float:
        """How far one sample of contributions of norm 1 moves C S: in the whole run, or in one turn of its group."""
        return self._sensitivity(self.schedule.steps)

    @property
    def error(self) -> float:
        """Root mean square noise in the sums of all releases so far, over the steps, in units of max_grad_norm."""
        return self.noise_multiplier * self.sensitivity * prefix_error(self.correlation.noising(self.schedule.steps))

    def releases(self, steps: int | None = None) -> Counts:
        """Return what the first `steps` steps, or the whole run, are for accounting."""
        steps = self.schedule.steps if steps is None else min(steps, self.schedule.steps)
        if steps < 1:
            raise ConfigurationError("The run has no steps: give the schedule at least one phase (batch_size, steps).")
        if self.sampling == "fixed-order":
            # The first steps move less than the whole run, under the same noise.
            sigma = self.noise_multiplier * self.sensitivity / self._sensitivity(steps)
            return ((Release(sigma, 1.0, self.sample_size), 1),)
        probability = self.correlation.bands * self.schedule[0] / self.sample_size
        turn = Release(self.noise_multiplier, min(1.0, probability), self.sample_size)
        return ((turn, math.ceil(steps / self.correlation.bands)),)

    def _sensitivity(self, steps: int) -> float:
        strategy = self.correlation.strategy(self.schedule.steps)[:steps]
        separation = self.sample_size // self.schedule[0] if self.sampling == "fixed-order" else steps
        return sensitivity(strategy, separation=separation)


def independent_error(noise_multiplier: float, steps: int) -> float:
    """Return `CorrelatedMechanism.error` of independent noise of this multiplier in every step."""
    return noise_multiplier * math.sqrt((steps + 1) / 2)
