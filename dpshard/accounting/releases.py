"""The release of a step: all facts that determine its privacy.

[Note: Releases and relations]
Composition ignores the order of steps, so a run is a multiset of releases. One sample of the N contributes zero in one
of two neighbouring data sets (zero-out at fixed N). Without a cap, a missing sample releases the same, so
dp-accounting's add-or-remove-one covers this. With a cap, a removed sample gives its slot to another one. That moves
the sum by 2 R; replace-special covers it.

[Note: The price of a grid]
Discrete Gaussian noise has a standard deviation of s = 2^24 grid steps, so a step is sigma R / s. Sums at distance R
are at most s / sigma + ROUNDING sqrt(d) steps apart ([Note: Noise on a grid] in noise/keyed.py). The accounted noise
multiplier is s over that distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal

from dpshard.config import is_count, is_number
from dpshard.errors import ConfigurationError
from dpshard.noise import LOG2_STD

Counts = tuple[tuple["Release", int], ...]
"""Distinct releases and their counts."""
Relation = Literal["add-or-remove-one", "replace-special"]
"""Neighbouring relation; see [Note: Releases and relations]."""

SIMULATION_FAILURE = 1e-12
"""Probability that a simulation fails, which counts towards delta."""
ROUNDING = 1 + 2.0**-5
"""Distance that rounding adds to sums, in grid steps over sqrt(d); see [Note: Noise on a grid] in noise/keyed.py."""


@dataclass(frozen=True, slots=True)
class Release:
    """A noisy sum over a Poisson batch, or the noisy sums of an epoch of random allocation."""

    noise_multiplier: float
    """Standard deviation of the noise over the L2 sensitivity; 0 means no privacy at all."""
    sampling_probability: float
    """Probability that a sample is in the batch, in (0, 1]."""
    sample_size: int
    """Number of samples of the data set."""
    max_batch_size: int | None = None
    """Cap of a Poisson batch, or None."""
    quantile_counts: int = 0
    """Number of groups that release a count of unclipped samples. Sum and counts form one Gaussian mechanism of this
    noise multiplier.
    """
    discretized_elements: int | None = None
    """Number of elements that are rounded to the grid of discrete Gaussian noise, or None."""
    max_rows_per_unit: int = 1
    """Largest number of samples of a unit of privacy ([Note: Units of several samples] in mixtures.py)."""
    allocated_steps: int | None = None
    """The sums are the first n steps of an epoch of T, with n / T = `sampling_probability` ([Note: The pair of random
    allocation] in allocation.py).
    """
    overlaps: tuple[float, ...] | None = None
    """[T // 2 + 1], beginning with 1, for a run with correlated noise and epochs of T steps ([Note: Bins on a circle]
    in simulation.py).
    """

    def __post_init__(self) -> None:
        if not (is_number(self.noise_multiplier) and 0 <= self.noise_multiplier < math.inf):
            raise ConfigurationError(f"noise_multiplier={self.noise_multiplier!r}: it must be finite and at least 0.")
        if not (is_number(self.sampling_probability) and 0 < self.sampling_probability <= 1):
            raise ConfigurationError(
                f"sampling_probability={self.sampling_probability!r}: it is (batch size) / (sample size), in (0, 1]."
            )
        for name in ("sample_size", "max_batch_size", "discretized_elements", "max_rows_per_unit", "allocated_steps"):
            value = getattr(self, name)
            if not (is_count(value) or (name not in ("sample_size", "max_rows_per_unit") and value is None)):
                raise ConfigurationError(f"{name}={value!r}: it must be a positive int.")
        if not (is_count(self.quantile_counts) or (type(self.quantile_counts) is int and self.quantile_counts == 0)):
            raise ConfigurationError(f"quantile_counts={self.quantile_counts!r}: it must be an int, 0 or above.")
        if self.overlaps is not None:
            object.__setattr__(self, "overlaps", tuple(self.overlaps))
            if self.sampling_probability != 1 or not _are_overlaps(self.overlaps, self.allocated_steps):
                raise ConfigurationError("overlaps=: give T // 2 + 1 numbers from 0 to 1, the first of them 1.")

    @property
    def epoch_steps(self) -> int:
        """Steps T of an epoch of random allocation, or 1."""
        return 1 if self.allocated_steps is None else round(self.allocated_steps / self.sampling_probability)

    @property
    def accounted_noise_multiplier(self) -> float:
        """Standard deviation of the noise over the largest change by one sample, rounding included."""
        if self.discretized_elements is None:
            return self.noise_multiplier
        moved = ROUNDING * math.sqrt(self.discretized_elements) / 2**LOG2_STD  # in standard deviations
        return self.noise_multiplier / (1 + moved * self.noise_multiplier)

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the privacy loss, in leading order: q sqrt(e^(1/sigma^2) - 1).

        The root of its sum of squares over the steps is the mu of the central limit (arXiv:1911.11607).
        """
        inverse_variance = self.noise_multiplier**-2 if self.noise_multiplier > 0.04 else math.inf
        return math.sqrt(self.sampled_variance * math.expm1(inverse_variance))

    @property
    def sampled_variance(self) -> float:
        """Factor of e^(1/sigma^2) - 1 in the variance of the likelihood ratio, over allocated steps."""
        if self.overlaps is not None:
            return sum(self.overlaps) / len(self.overlaps)
        return self.sampling_probability**2 / (self.allocated_steps or 1)


def _are_overlaps(overlaps: tuple[float, ...], steps: int | None) -> bool:
    whole = steps is not None and len(overlaps) == steps // 2 + 1 and overlaps[0] == 1
    return whole and all(is_number(overlap) and 0 <= overlap <= 1 for overlap in overlaps)


def relation_of(releases: Iterable[Release]) -> Relation:
    """Return the relation under which `releases` compose: "replace-special" if one of them has a cap."""
    capped = any(release.max_batch_size is not None for release in releases)
    return "replace-special" if capped else "add-or-remove-one"


def in_figures(value: float) -> str:
    """Return `value` to 6 figures, or in full if these are less."""
    shown = f"{value:g}"
    return shown if float(shown) >= value else repr(float(value))


def rounded_up(value: float, digits: int = 4) -> str:
    """Return `value` rounded up to `digits` decimals, or to `digits` significant figures if it is small."""
    if not math.isfinite(value):
        return "infinity (not private)"
    if value <= 0:
        return f"{0:.{digits}f}"
    # Binary rounding must not raise 1.1.
    exact = Decimal(value) - 4 * Decimal(math.ulp(value))
    if value < 10.0 ** (1 - digits):
        return f"{Context(prec=digits, rounding=ROUND_CEILING).plus(exact):.{digits - 1}e}"
    return str(exact.quantize(Decimal(10) ** -digits, ROUND_CEILING))
