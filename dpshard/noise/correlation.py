"""Noise correlated over the steps of a run: its weights, sensitivity and error. No torch in here.

Step t releases y_t = s_t + sum over j of w_j z_{t-j}, for the clipped sum s_t and independent noise z_t. So Y = S + W Z
= W (C S + Z), where W and its inverse C are lower triangular and Toeplitz. C S + Z is a Gaussian mechanism (Denisov et
al. 2022, arXiv:2202.08312).

A sample takes part at steps at least b apart, with contributions of norm at most R. Let e_n be the largest |c_m| with m
>= n, and E the Toeplitz matrix of e. The sample moves the first n rows of C S by at most those of R |E_0 + E_b + E_{2b}
+ ...|; docs/accounting.md has the proof. If c_n = 0 for n >= b, C may replace E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from dpshard.config import is_count, is_number
from dpshard.errors import ConfigurationError
from dpshard.noise.workloads import Series, Workload, inverse, never_rising, optimised, sum_of_columns

PREFIX_SUMS = Workload()
LARGEST_WEIGHT = 2.0**20
"""Largest weight of noise. Rounding larger ones moves C by more than about 1e-9."""


class Correlation(Protocol):
    """Guarantee: `noising` and `strategy` are inverse Toeplitz matrices, and both begin with 1."""

    @property
    def bands(self) -> int:
        """Number of non-zero coefficients of one of the two."""
        ...

    def noising(self, steps: int) -> Series:
        """Weights w [T] of the noise of this step and of earlier ones."""
        ...

    def strategy(self, steps: int) -> Series:
        """First column c [T] of C."""
        ...


@dataclass(frozen=True, kw_only=True)
class BandedInverse:
    """Noise z_t + w_1 z_{t-1} + ... + w_{p-1} z_{t-p+1}; the p vectors are drawn again, not stored.

    By default, weights are those of the square root of 1 - x (BISR; Kalinin et al. 2025, arXiv:2505.12128).
    Coefficients (1, -lambda) give DP-lambda-CGD (arXiv:2601.22334).
    """

    bands: int
    """Number p of noise vectors in a release; 1 is plain noise."""
    coefficients: tuple[float, ...] | None = None
    """Weights w_0 = 1, ..., w_{p-1}; None for the default."""
    workload: Workload | None = None
    """Sums for which weights minimise the noise, or None."""

    def __post_init__(self) -> None:
        _require_bands(self)

    def __repr__(self) -> str:
        return _shown(self)

    def noising(self, steps: int) -> Series:
        """Weights [steps]."""
        _require_known(self)
        known = PREFIX_SUMS.root(self.bands) if self.coefficients is None else np.array(self.coefficients)
        return _cut(known, steps)

    def strategy(self, steps: int) -> Series:
        """First column of C [steps]."""
        return inverse(self.noising(self.bands), steps)


@dataclass(frozen=True, kw_only=True)
class BandMF:
    """Noise C^-1 z for a Toeplitz matrix C with b bands; McKenna et al. 2024, arXiv:2405.15913.

    By default, coefficients minimise the error of prefix sums, for one participation.
    """

    bands: int
    """Number b of non-zero diagonals of C."""
    coefficients: tuple[float, ...] | None = None
    """Diagonals c_0 = 1, ..., c_{b-1} of C; None for the default."""
    workload: Workload | None = None
    """Sums for which coefficients minimise the noise, or None."""
    buffers: bool = False
    """Keep the last b - 1 noise vectors of the rank's shards. Otherwise draw those of all steps again."""

    def __post_init__(self) -> None:
        _require_bands(self)
        if not isinstance(self.buffers, bool):
            raise ConfigurationError(f"BandMF(buffers={self.buffers!r}): pass True or False.")

    def __repr__(self) -> str:
        return _shown(self)

    def noising(self, steps: int) -> Series:
        """Weights [steps]."""
        return inverse(self.strategy(steps), steps)

    def strategy(self, steps: int) -> Series:
        """First column of C [steps]."""
        _require_known(self)
        if self.coefficients is None:
            return _cut(optimised(min(self.bands, steps), steps, steps, PREFIX_SUMS, inverted=False), steps)
        return _cut(np.array(self.coefficients), steps)


@lru_cache(maxsize=16)
def explicit(correlation: BandedInverse | BandMF, steps: int, separation: int) -> BandedInverse | BandMF:
    """Return `correlation` with its coefficients for a run.

    A sample takes part at most once in any `separation` steps. Raise ConfigurationError for noise that grows from step
    to step.
    """
    if correlation.coefficients is not None:
        return _supported(_with(correlation, np.array(correlation.coefficients)), steps)
    inverted = isinstance(correlation, BandedInverse)
    if correlation.workload is None:
        return _with(correlation, correlation.noising(steps) if inverted else correlation.strategy(steps))
    bands, separation = min(correlation.bands, steps), min(separation, steps)
    return _with(correlation, optimised(bands, steps, separation, correlation.workload, inverted=inverted))


def _with(correlation: BandedInverse | BandMF, found: Series) -> BandedInverse | BandMF:
    coefficients = tuple(_cut(found[: correlation.bands], correlation.bands).tolist())
    return type(correlation)(bands=correlation.bands, coefficients=coefficients)


def _supported(correlation: BandedInverse | BandMF, steps: int) -> BandedInverse | BandMF:
    largest = np.abs(correlation.noising(steps)).max()
    if not largest <= LARGEST_WEIGHT:
        raise ConfigurationError(
            f"The noise of these coefficients grows from step to step, to {largest:.3g} times the first one. So its "
            f"weights, rounded to floats, have another sensitivity than the coefficients. Choose coefficients "
            f"whose inverse stays small, or the default ones."
        )
    return correlation


@lru_cache(maxsize=16)
def sensitivities(correlation: Correlation, steps: int, separation: int) -> Series:
    """Return `furthest_moves` of a run of `steps` steps, [steps]."""
    return furthest_moves(correlation.strategy(steps), separation)


def furthest_moves(strategy: Series, separation: int) -> Series:
    """Bound how far one sample moves the first n rows of C S, for n = 1, ..., len(strategy).

    Its contributions of norm 1 are at least `separation` steps apart. Raise ConfigurationError if a bound overflows.
    """
    overlap = strategy[separation:].any()
    move = sum_of_columns(never_rising(strategy) if overlap else strategy, separation)
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = np.sqrt(np.cumsum(move**2))
    if not math.isfinite(bounds[-1]):
        raise ConfigurationError(
            "The sensitivity of these coefficients overflows: the inverse of their Toeplitz matrix grows from step to "
            "step. Choose coefficients with a sum above 0, or the default ones."
        )
    return bounds


def weights_at(correlation: Correlation, steps: int, step: int) -> Series:
    """Return w_0, ..., w_k of the noise released at `step` of `steps`, with w_k != 0."""
    series = correlation.noising(steps)[: step + 1]
    return series[: int(np.flatnonzero(series)[-1]) + 1]


def _require_known(correlation: BandedInverse | BandMF) -> None:
    if correlation.workload is not None:
        raise ConfigurationError(
            f"{correlation!r}: its coefficients depend on how often a sample takes part in the run. Ask the run's "
            f"mechanism.correlation for them."
        )


def _shown(correlation: BandedInverse | BandMF) -> str:
    shown = f"bands={correlation.bands!r}, coefficients={correlation.coefficients!r}"
    if correlation.workload is not None:
        shown += f", workload={correlation.workload!r}"
    if isinstance(correlation, BandMF) and correlation.buffers:
        shown += ", buffers=True"
    return f"{type(correlation).__name__}({shown})"


def _require_bands(correlation: BandedInverse | BandMF) -> None:
    name, bands, coefficients = type(correlation).__name__, correlation.bands, correlation.coefficients
    if not is_count(bands):
        raise ConfigurationError(f"{name}(bands={bands!r}): it must be an int, at least 1.")
    if not isinstance(correlation.workload, Workload | None):
        raise ConfigurationError(f"{name}(workload={correlation.workload!r}): pass a dpshard.Workload, or None.")
    if coefficients is None:
        return
    if correlation.workload is not None:
        raise ConfigurationError(
            f"{name}: coefficients are optimised for a workload. Leave out `coefficients` or `workload`."
        )
    if not (isinstance(coefficients, tuple) and all(is_number(x) and math.isfinite(x) for x in coefficients)):
        raise ConfigurationError(f"{name}(coefficients={coefficients!r}): pass a tuple of finite numbers.")
    if len(coefficients) != bands or coefficients[0] != 1:
        raise ConfigurationError(
            f"{name}(coefficients=...) has {len(coefficients)} numbers for {bands} bands, beginning with "
            f"{coefficients[:1]}: pass one number for each band, the first of them 1."
        )


def _cut(known: Series, steps: int) -> Series:
    series = np.zeros(steps)
    series[: len(known)] = known[:steps]
    return series
