"""Runs with noise correlated over steps: their releases for accounting, and their error.

[Note: Two ways to sample under correlated noise]
The releases of a run are W (C S + Z), where C S + Z is one Gaussian mechanism ([Note: A run as one Gaussian
mechanism] in noise/correlation.py). Neighbours are zero-out: a sample that contributes nothing keeps its place in the
order, else all later samples would move.
- "fixed-order": a sample is in at most one of any b = floor(N / B) consecutive steps. An order that every epoch repeats
  has this property, with or without the last, smaller batch; so has a cyclic order. Without amplification by sampling,
  the run is one Gaussian release with the sensitivity of C under that separation.
- "cyclic-poisson": the samples are in b groups, b the bands of C. Step t draws each sample of group t mod b with
  probability b B / N. Columns of C at distance b share no row. So the rows of C S + Z fall into windows of b steps, one
  for each of the ceil(T / b) turns of the sample's group. In each window the sample contributes with probability b B /
  N, independently of all others, along one column of norm at most |c|. So a window is a Poisson-sampled Gaussian, and
  the run composes them (Choquette-Choo et al. 2023, arXiv:2306.08153).
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
"""See [Note: Two ways to sample under correlated noise]."""

INDEPENDENT = BandedInverse(bands=1)
"""Uncorrelated noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelatedMechanism:
    """Noisy sums of a planned run, with noise correlated over its steps."""

    noise_multiplier: float = math.nan
    """Standard deviation of z over max_grad_norm times `sensitivity`, >= 0. NaN before calibration."""
    schedule: BatchSchedule
    """Logical batch sizes, expected or exact; all equal."""
    sample_size: int
    """Number of samples of the data set; public."""
    sampling: CorrelatedSampling
    correlation: BandedInverse | BandMF = INDEPENDENT

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, get_args(CorrelatedSampling))
        if len(set(self.schedule.sizes)) != 1:
            raise ConfigurationError(
                f"sampling={self.sampling!r} needs one batch size in all steps: it determines the number of steps "
                f"between two participations of a sample. Give batch_size as an int."
            )
        if self.schedule[0] > self.sample_size:
            raise ConfigurationError(
                f"batch_size={self.schedule[0]} is more than sample_size={self.sample_size}. Take smaller batches."
            )
        if self.sampling == "cyclic-poisson":
            self._check_groups()

    def _check_groups(self) -> None:
        if not isinstance(self.correlation, BandMF):
            raise ConfigurationError(
                f"sampling='cyclic-poisson' needs BandMF(bands=...): its columns end after their bands. Those of "
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
        """Largest change of C S by one sample of contributions of norm 1: in the run, or in one turn of its group."""
        return self._sensitivity(self.schedule.steps)

    @property
    def error(self) -> float:
        """Root mean square noise in the prefix sums of the releases, in units of max_grad_norm."""
        return self.noise_multiplier * self.sensitivity * prefix_error(self.correlation.noising(self.schedule.steps))

    def releases(self, steps: int | None = None) -> Counts:
        """Return the releases of the first `steps` steps, or of the whole run."""
        steps = self.schedule.steps if steps is None else min(steps, self.schedule.steps)
        if steps < 1:
            raise ConfigurationError("The run has no steps: give the schedule at least one phase (batch_size, steps).")
        if self.sampling == "fixed-order":
            # A prefix of the run has a smaller sensitivity under the same noise.
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
    """Return `CorrelatedMechanism.error` of independent noise with this multiplier."""
    return noise_multiplier * math.sqrt((steps + 1) / 2)
