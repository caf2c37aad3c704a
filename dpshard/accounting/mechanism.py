"""The mechanism of a run: what determines epsilon, and must match in a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import get_args

from dpshard.accounting.balls_in_bins import BallsInBins
from dpshard.accounting.releases import Counts, Release, relation_of
from dpshard.accounting.sampling_schemes import MOST_BINS, CorrelatedBins, CyclicPoisson, FixedOrder, SamplingScheme
from dpshard.accounting.spans import Span
from dpshard.config import (
    AccountantName,
    BatchSchedule,
    LossReduction,
    NoiseName,
    SamplingName,
    is_count,
    require_choice,
    require_rows_per_unit,
    steps_of_epoch,
)
from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import PREFIX_SUMS, BandedInverse, BandMF, explicit, weights_at
from dpshard.noise.workloads import Workload

INDEPENDENT = BandedInverse(bands=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledMechanism:
    """Noisy sums over the batches of a schedule."""

    noise_multiplier: float = math.nan
    """Standard deviation of the noise over the L2 sensitivity; unitless, >= 0. NaN before calibration.

    For correlated noise, the standard deviation of z over `max_grad_norm` times `sensitivity`.
    """
    schedule: BatchSchedule
    """Logical batch sizes: expected ones, or exact ones in a fixed order."""
    sample_size: int
    """Number of samples of the data set; public."""
    max_batch_size: int | None = None
    """Cap of a Poisson batch, or None."""
    quantile_counts: int = 0
    """Number of groups that release a count of unclipped samples at every step."""
    discretized_elements: int | None = None
    """Number of elements that are rounded to the grid of discrete Gaussian noise, or None."""
    earlier: Counts = ()
    """Releases about the same samples before the run, which epsilon covers."""
    sampling: SamplingName = "poisson"
    """How batches are drawn; see [Note: Ways to sample] in sampling_schemes.py."""
    noise_correlation: BandedInverse | BandMF | None = None
    """Correlation of the noise over steps, or None."""

    def __post_init__(self) -> None:
        require_sampling(self)

    @property
    def noise(self) -> NoiseName:
        """Distribution of the noise."""
        return "gaussian" if self.discretized_elements is None else "discrete-gaussian"

    @property
    def correlation(self) -> BandedInverse | BandMF:
        """The correlation with its coefficients in this run."""
        separation = self._steps  # in cyclic sampling, a turn of a group is a release
        if self.sampling == "fixed-order":
            separation = self.sample_size // self.schedule[0]
        elif self.sampling == "balls-in-bins":
            separation = steps_of_epoch(self.sample_size, self.schedule[0])  # on average
        return explicit(self.noise_correlation or INDEPENDENT, self._steps, separation)

    @property
    def workload(self) -> Workload:
        """The sums of releases whose noise `error` measures."""
        return (self.noise_correlation and self.noise_correlation.workload) or PREFIX_SUMS

    @property
    def scheme(self) -> SamplingScheme | None:
        """Composition of the steps; None if each is a release of its own."""
        if self.sampling == "poisson":
            return None
        correlation = self.correlation
        whole, size, steps = Release(self.noise_multiplier, 1.0, self.sample_size), self.schedule[0], self._steps
        if self.sampling == "balls-in-bins":
            T = steps_of_epoch(self.sample_size, size)
            if self.noise_correlation is not None:
                return CorrelatedBins(self.noise_multiplier, self.sample_size, steps, correlation, T)
            return BallsInBins(replace(whole, quantile_counts=self.quantile_counts, allocated_steps=T), steps)
        if self.sampling == "fixed-order":
            return FixedOrder(whole, steps, correlation, self.sample_size // size)
        probability = min(1.0, correlation.bands * size / self.sample_size)
        return CyclicPoisson(replace(whole, sampling_probability=probability), steps, correlation)

    @property
    def _steps(self) -> int:
        if not self.schedule.sizes:
            raise ConfigurationError("The run has no steps: give the schedule at least one phase (batch_size, steps).")
        return self.schedule.steps

    @property
    def sensitivity(self) -> float:
        """Largest change by one sample, with contributions of norm 1, of a sum, or of C S with correlated noise."""
        scheme = self.scheme
        return 1.0 if scheme is None else scheme.sensitivity

    @property
    def error(self) -> float:
        """Root mean square of the noise in the sums of the workload, divided by max_grad_norm."""
        return self.noise_multiplier * self.sensitivity * self.workload.error(self.correlation.noising(self._steps))

    @property
    def relation(self) -> str:
        """Neighbouring relation: "zero-out", or under Poisson sampling that of the releases."""
        return relation_of([self.release(0)]) if self.sampling == "poisson" else "zero-out"

    def noise_weights(self, step: int) -> tuple[float, ...]:
        """Return the weights w_0 = 1, w_1, ... of the noise of `step` and of earlier steps."""
        if self.noise_correlation is None:
            return (1.0,)
        return tuple(weights_at(self.correlation, self._steps, step).tolist())

    def release(self, step: int) -> Release:
        """Return the release of `step`, or the one it is part of; past the end, the last one."""
        scheme = self.scheme
        return self._release(self.schedule[step]) if scheme is None else scheme.release

    def releases(self, steps: int | None = None) -> Counts:
        """Return the earlier releases, and those of the first `steps` steps, by default all."""
        scheme, steps = self.scheme, self._steps if steps is None else min(steps, self._steps)
        if steps < 1:
            raise ConfigurationError("No release before the first step: ask for at least one step.")
        if scheme is not None:
            return (*self.earlier, *scheme.cost([Span("", 0, steps, scheme.release, False)]).items())
        sizes = Counter(self.schedule.sizes[:steps])
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
    """A mechanism of single samples, where a unit of privacy has several."""

    max_rows_per_unit: int
    """Largest number of samples of one unit."""

    def __post_init__(self) -> None:
        SampledMechanism.__post_init__(self)
        if self.sampling != "poisson":
            raise ConfigurationError(
                f"sampling={self.sampling!r} is analysed for units of one sample: leave max_rows_per_unit out."
            )

    def _release(self, batch_size: int) -> Release:
        release = SampledMechanism._release(self, batch_size)  # super() has lost the class, which slots have replaced
        return replace(release, max_rows_per_unit=self.max_rows_per_unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism(SampledMechanism):
    """All that determines the privacy guarantee and its report."""

    max_grad_norm: float
    """L2 sensitivity of the clipped sum, sqrt(sum of R_m squared) over the groups. Adaptive thresholds start from it.
    """
    clipping_fn: str
    """`repr` of the clipping function."""
    clipping_groups: tuple[tuple[str, ...], ...]
    """Parameter names of the M clipping groups; each starts with the threshold max_grad_norm / sqrt(M)."""
    adaptive_clipping: str | None
    """`repr` of the rule for thresholds, or None."""
    loss_reduction: LossReduction
    """How the loss reduces the rows of a micro-batch."""
    rows_per_unit: int = 1
    """Rows of a sample, the unit of privacy."""
    secure: bool
    """True for secure noise; a resumed run must use the same kind."""
    accountant: AccountantName
    """Accountant of epsilon."""
    target_delta: float
    """Delta of the reported epsilon."""
    target_epsilon: float | None
    """Budget at which the run stops, or None."""

    def __post_init__(self) -> None:
        SampledMechanism.__post_init__(self)
        require_rows_per_unit(self.rows_per_unit)
        for release, count in self.earlier:
            if not (isinstance(release, Release) and is_count(count) and release.sample_size == self.sample_size):
                raise ConfigurationError(
                    f"earlier={self.earlier!r}: give pairs of a Release about the same {self.sample_size} samples and "
                    f"its positive count."
                )


def independent_error(noise_multiplier: float, steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """Return `SampledMechanism.error` of independent noise with this multiplier."""
    return noise_multiplier * workload.error(INDEPENDENT.noising(steps))


def require_sampling(mechanism: SampledMechanism) -> None:
    """Raise ConfigurationError unless the run can be analysed with its sampling and correlation of noise."""
    sampling, correlation = mechanism.sampling, mechanism.noise_correlation
    require_choice("sampling", sampling, get_args(SamplingName))
    if not isinstance(correlation, BandedInverse | BandMF | None):
        raise ConfigurationError(
            f"noise_correlation={correlation!r}: pass dpshard.BandedInverse(bands=p), dpshard.BandMF(bands=b), or None."
        )
    if sampling == "poisson":
        if correlation is not None:
            raise ConfigurationError(
                f"noise_correlation={correlation!r} cannot be analysed under sampling='poisson', where a sample may "
                f"come at any step. Take sampling='fixed-order', or 'cyclic-poisson' with BandMF."
            )
        return
    _require_kind(mechanism)
    steps = mechanism.schedule.steps
    if correlation is not None and correlation.bands > steps > 0:
        raise ConfigurationError(
            f"{type(correlation).__name__}(bands={correlation.bands}) has more bands than the run has steps, {steps}. "
            f"Take at most {steps} bands, or more steps."
        )
    if sampling == "cyclic-poisson":
        _require_groups(mechanism)
    if sampling == "balls-in-bins" and correlation is not None:
        _require_bins(mechanism)


def _require_bins(mechanism: SampledMechanism) -> None:
    sizes = mechanism.schedule.sizes
    if sizes and steps_of_epoch(mechanism.sample_size, sizes[0]) > MOST_BINS:
        raise ConfigurationError(
            f"sampling='balls-in-bins' with correlated noise is analysed for at most {MOST_BINS} steps an epoch. Take "
            f"larger batches, or sampling='cyclic-poisson' with BandMF."
        )


def _require_kind(mechanism: SampledMechanism) -> None:
    where, sizes = f"sampling={mechanism.sampling!r}", mechanism.schedule.sizes
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            f"{where} needs one batch size in all steps: it decides when a sample returns. Give batch_size as an int."
        )
    if sizes and sizes[0] > mechanism.sample_size:
        raise ConfigurationError(
            f"batch_size={sizes[0]} is more than sample_size={mechanism.sample_size}. Take smaller batches."
        )
    if mechanism.max_batch_size is not None:
        raise ConfigurationError(
            f"{where} is not analysed with a cap: leave max_batch_size={mechanism.max_batch_size} out."
        )
    shared = mechanism.sampling != "balls-in-bins" or mechanism.noise_correlation is not None
    if mechanism.quantile_counts and shared:
        raise ConfigurationError(
            f"{where} needs fixed thresholds: adaptive_clipping would change the noise from step to step, but steps "
            f"share their noise, and one sensitivity holds for the run. Leave it out."
        )
    if mechanism.discretized_elements is not None:
        why = ": weighted sums of discrete noise are not on its grid" if shared else ""
        raise ConfigurationError(f"{where} is analysed for Gaussian noise{why}. Take noise='gaussian'.")


def _require_groups(mechanism: SampledMechanism) -> None:
    correlation, samples, sizes = mechanism.noise_correlation, mechanism.sample_size, mechanism.schedule.sizes
    if not isinstance(correlation, BandMF):
        raise ConfigurationError(
            f"sampling='cyclic-poisson' needs BandMF(bands=...), whose columns end after their bands, but "
            f"noise_correlation={correlation!r}. Take BandMF, or sampling='fixed-order'."
        )
    if sizes and correlation.bands * sizes[0] > samples:
        raise ConfigurationError(
            f"sampling='cyclic-poisson': BandMF(bands={correlation.bands}) makes groups of "
            f"{samples / correlation.bands:g} samples, fewer than batch_size={sizes[0]}. Take at most "
            f"{samples // sizes[0]} bands, or smaller batches."
        )
