"""Private location and spread of number columns, and private counts of classes.

[Note: A noisy bisection]
The p-quantile t of a column is the root of f(t) = sum over rows of ([x <= t] - p). ROUNDS halvings find it, for all
columns at once, each by the sign of f(t) with Gaussian noise. A sample contributes at most max(p, 1 - p) to f, nothing
where its cell is missing; a unit of several rows contributes their mean. So the vector of d columns moves by at most
sqrt(d) max(p, 1 - p). The first bisection finds medians, the second the quantiles SPREAD of distances from them.

Adaptive Gaussian mechanisms of noise multipliers sigma_r compose exactly to one of (sum of sigma_r^-2)^(-1/2): Dong et
al. 2019, arXiv:1905.02383, Cor. 3.3. So 2 ROUNDS halvings of sqrt(2 ROUNDS) sigma are one release of sigma about all
samples. Counts of classes are one more: a unit adds shares that sum to 1, so the vector moves by at most 1. With both,
each part has sqrt(2) times the noise. A missing sample contributes zero, as in the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpshard.accounting import Release, calibrate_release
from dpshard.accounting.releases import Counts
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource, derive_key, new_run_secret

ROUNDS = 20
SPREAD = 0.75
WIDTH = 2.5
"""Bounds are WIDTH spreads around the median."""
SMALLEST, LARGEST = 1e-6, 1e15
"""Smaller values look alike, larger ones are clipped."""

Values = NDArray[np.float64]


def noise_for(share: float, *, samples: int, target_epsilon: float, target_delta: float) -> float:
    """Return the noise of statistics that alone cost `share` of epsilon."""
    if not 0 < share < 1:
        raise ConfigurationError(f"statistics_share={share!r}: it is above 0 and below 1.")
    alone = calibrate_release(samples, target_epsilon=share * target_epsilon, target_delta=target_delta)
    return alone.noise_multiplier


@dataclass(frozen=True, slots=True)
class Statistics:
    """Private bounds [D, 2]."""

    bounds: Values
    earlier: Counts
    """Their release, for `PrivacyEngine(earlier=)`."""
    counts: Values | None = None


def private_statistics(
    cells_ND: Values,
    noise_multiplier: float,
    *,
    units: NDArray[np.int64] | None = None,
    labels: NDArray[np.int64] | None = None,
    classes: int = 0,
    secret: bytes | None = None,
) -> Statistics:
    """Return bounds of columns, counts of classes if `labels` [N] are given, and the one release of both.

    `cells_ND` are float64, NaN where missing. `units` [N] number each row's unit; None if a row is one. `secret` is for
    tests.
    """
    rows, columns = cells_ND.shape
    units = np.arange(rows) if units is None else units
    count_U = np.bincount(units)
    if rows == 0 or (count_U == 0).any():
        raise ConfigurationError("units: number the units of the rows from 0, without gaps.")
    parts = (columns > 0) + (labels is not None)
    if parts == 0:
        return Statistics(np.empty((0, 2)), ())
    weight_N, sigma = 1.0 / count_U[units], math.sqrt(parts) * noise_multiplier
    source = RandomSource(derive_key(new_run_secret() if secret is None else secret, "statistics"))
    earlier = ((Release(noise_multiplier, 1.0, len(count_U)), 1),)
    counts_K = None
    if labels is not None:
        counts_K = np.bincount(labels, weight_N, classes) + sigma * _normals(source, classes)
    if columns == 0:
        return Statistics(np.empty((0, 2)), earlier, counts_K)
    finite_ND = np.where(np.isfinite(cells_ND), cells_ND.clip(-LARGEST, LARGEST), np.nan)
    middle_D = quantiles(finite_ND, weight_N, 0.5, -LARGEST, sigma, source)
    spread_D = quantiles(np.abs(finite_ND - middle_D), weight_N, SPREAD, 0.0, sigma, source)
    # A column of mostly one value has no spread.
    half_D = np.where(spread_D > 3e-4 * np.abs(middle_D) + SMALLEST, WIDTH * spread_D, 1.0)
    bounds_D2 = np.stack([middle_D - half_D, middle_D + half_D], axis=1)
    return Statistics(bounds_D2, earlier, counts_K)


def balanced(counts_K: Values, noise_multiplier: float) -> tuple[float, ...]:
    """Return weights: one over the shares of classes."""
    least = max(1.0, math.sqrt(2) * noise_multiplier)
    shares_K = np.maximum(counts_K, least) / np.maximum(counts_K, least).sum()
    return tuple((1 / shares_K).tolist())


def quantiles(x_ND: Values, weight_N: Values, p: float, least: float, sigma: float, source: RandomSource) -> Values:
    """Return private p-quantiles [D] above `least`; two such cost one release of `sigma`."""
    columns = x_ND.shape[1]
    std = math.sqrt(2 * ROUNDS) * sigma * math.sqrt(columns) * max(p, 1 - p)
    low_D, high_D = np.full(columns, _position(least)), np.full(columns, _position(LARGEST))
    for _ in range(ROUNDS):
        middle_D = (low_D + high_D) / 2
        below_D = excess(x_ND, weight_N, p, _value(middle_D)) + std * _normals(source, columns) < 0
        low_D, high_D = np.where(below_D, middle_D, low_D), np.where(below_D, high_D, middle_D)
    return _value((low_D + high_D) / 2)


def excess(x_ND: Values, weight_N: Values, p: float, at_D: Values) -> Values:
    """Return f [D], without noise; see [Note: A noisy bisection]."""
    with np.errstate(invalid="ignore"):
        return weight_N @ (x_ND <= at_D) - p * (weight_N @ ~np.isnan(x_ND))


def _normals(source: RandomSource, n: int) -> Values:
    return np.concatenate([normals.copy() for normals in source.normals(n, np.float64)])


def _position(x: float) -> float:
    return math.copysign(math.log1p(abs(x) / SMALLEST), x)


def _value(position: Values) -> Values:
    return np.sign(position) * np.expm1(np.abs(position)) * SMALLEST
