"""The mechanism of a run: what determines epsilon, and must match in a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from dpshard.accounting.releases import Counts, Release
from dpshard.config import AccountantName, BatchSchedule, LossReduction, NoiseName, check_rows_per_unit, is_count
from dpshard.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledMechanism:
    """Noisy sums over Poisson batches of a schedule: what determines epsilon."""

    noise_multiplier: float = math.nan
    """Standard deviation of the noise over the L2 sensitivity; unitless, >= 0. NaN before calibration."""
    schedule: BatchSchedule
    """Expected logical batch sizes; over sample_size, the sampling probabilities."""
    sample_size: int
    """Number of samples of the data set; public."""
    max_batch_size: int | None = None
    """Cap of a truncated Poisson batch, or None."""
    quantile_counts: int = 0
    """Groups that release a count of unclipped samples at every step."""
    discretized_elements: int | None = None
    """Number of elements rounded to the grid of discrete Gaussian noise ([Note: Noise on a grid] in noise/keyed.py);
    None if the noise is Gaussian."""
    earlier: Counts = ()
    """Releases about the same samples before the run, such as private statistics; epsilon covers them, too."""

    @property
    def noise(self) -> NoiseName:
        """Distribution of the noise."""
        return "gaussian" if self.discretized_elements is None else "discrete-gaussian"

    def release(self, step: int) -> Release:
        """Return the release of `step`; past the end, the last one."""
        return self._release(self.schedule[step])

    def releases(self, steps: int | None = None) -> Counts:
        """Return the earlier releases, and those of the first `steps` steps, or of the whole run."""
        sizes = Counter(self.schedule.sizes[:steps])
        if not sizes:
            raise ConfigurationError("The run has no steps: give the schedule at least one phase (batch_size, steps).")
        return (*self.earlier, *((self._release(size), count) for size, count in sizes.items()))

    def _release(self, batch_size: int) -> Release:
        return Release(
            self.noise_multiplier,
            batch_size / self.sample_size,
            self.sample_size,
            self.max_batch_size,
            self.quantile_counts,
            self.discretized_elements,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismOfUnits(SampledMechanism):
    """Samples are drawn one by one; a unit of privacy has up to `max_rows_per_unit` samples."""

    max_rows_per_unit: int
    """Samples of one unit, at most; see [Note: Units of several samples] in mixtures.py."""

    def _release(self, batch_size: int) -> Release:
        release = SampledMechanism._release(self, batch_size)  # super() has lost the class, which slots have replaced
        return replace(release, max_rows_per_unit=self.max_rows_per_unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism(SampledMechanism):
    """Everything that determines the privacy guarantee and its report."""

    max_grad_norm: float
    """L2 sensitivity of the clipped sum to one sample: sqrt(sum of R_m squared) over the groups; with adaptive
    thresholds, at the first step."""
    clipping_fn: str
    """`repr` of the clipping function with its settings; it guarantees factor * norm <= threshold."""
    clipping_groups: tuple[tuple[str, ...], ...]
    """Parameter names of the M clipping groups; each starts with the threshold max_grad_norm / sqrt(M)."""
    adaptive_clipping: str | None
    """`repr` of the rule for adaptive thresholds, or None."""
    loss_reduction: LossReduction
    """How the loss reduces the rows of a micro-batch: the scale of per-sample gradients."""
    rows_per_unit: int = 1
    """Rows of a sample, the unit of privacy; batch and sample sizes count samples."""
    secure: bool
    """True for [Note: Secure noise] in noise/keyed.py; a replay must use the same."""
    accountant: AccountantName
    """Accountant that computes epsilon."""
    target_delta: float
    """Delta of the reported epsilon."""
    target_epsilon: float | None
    """Budget at which the run stops, or None if noise_multiplier was given."""

    def __post_init__(self) -> None:
        check_rows_per_unit(self.rows_per_unit)
        for release, count in self.earlier:
            if not (isinstance(release, Release) and is_count(count) and release.sample_size == self.sample_size):
                raise ConfigurationError(
                    f"earlier={self.earlier!r}: give pairs of a Release about the same {self.sample_size} samples and "
                    f"its positive count."
                )
