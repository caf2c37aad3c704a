"""Private location and spread of number columns.

[Note: A noisy bisection]
The p-quantile t of a column is the root of f(t) = sum over rows of ([x <= t] - p). ROUNDS halvings find it, for all
columns at once, each by the sign of f(t) with Gaussian noise. A sample contributes at most max(p, 1 - p) to f of a
column, and nothing where its cell is missing. So without it, the vector of d columns moves by at most
sqrt(d) max(p, 1 - p). (A unit of several rows contributes the mean of its rows.) Halvings are spaced by logarithms, so
that columns of any size have bounds. The first bisection finds the medians, the second the quantiles SPREAD of the
distances from them.

[Note: One Gaussian release]
Each halving may depend on those before. Adaptive Gaussian mechanisms of noise multipliers sigma_r compose exactly to
one of (sum of sigma_r^-2)^(-1/2): Dong et al. 2019, arXiv:1905.02383, Cor. 3.3. So 2 ROUNDS halvings of sqrt(2 ROUNDS)
sigma are accounted as one release of sigma about all samples. A missing sample is one that contributes zero: the
neighbours of the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpshard.accounting import Release, SampledMechanism, calibrate
from dpshard.accounting.releases import Counts
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource, derive_key, new_run_secret

ROUNDS = 20
SPREAD = 0.75
WIDTH = 2.5
"""Bounds are the median and WIDTH spreads around it: 2.9 standard deviations of a normal."""
SMALLEST, LARGEST = 1e-6, 1e15
"""Values nearer to 0 look alike; larger ones are clipped."""

Values = NDArray[np.float64]


def noise_for(share: float, *, samples: int, target_epsilon: float, target_delta: float) -> float:
    """Return the noise multiplier of statistics that alone cost `share` of epsilon."""
    if not 0 < share < 1:
        raise ConfigurationError(f"statistics_share={share!r}: it is above 0 and below 1.")
    alone = SampledMechanism(schedule=BatchSchedule((samples,)), sample_size=samples)
    found = calibrate(alone, target_epsilon=share * target_epsilon, target_delta=target_delta)
    return found.noise_multiplier


@dataclass(frozen=True, slots=True)
class Statistics:
    """Private bounds, and what they cost."""

    bounds: Values
    """[D, 2]."""
    earlier: Counts
    """The release of them, for `PrivacyEngine(earlier=)`; empty without columns."""


def private_bounds(
    cells_ND: Values, noise_multiplier: float, *, units: NDArray[np.int64] | None = None, secret: bytes | None = None
) -> Statistics:
    """Return bounds [D, 2] of columns, and the one release that they cost.

    `cells_ND` are float64, NaN where missing; `units` [N] are the number of each row's unit, from 0, or None if a row
    is a unit. `secret` is for tests. See [Note: A noisy bisection].
    """
    rows, columns = cells_ND.shape
    units = np.arange(rows) if units is None else units
    count_U = np.bincount(units)
    if rows == 0 or (count_U == 0).any():
        raise ConfigurationError("units: number the units of the rows from 0, without gaps.")
    if columns == 0:
        return Statistics(np.empty((0, 2)), ())
    weight_N = 1.0 / count_U[units]
    source = RandomSource(derive_key(new_run_secret() if secret is None else secret, "statistics"))
    finite_ND = np.where(np.isfinite(cells_ND), cells_ND.clip(-LARGEST, LARGEST), np.nan)
    middle_D = quantiles(finite_ND, weight_N, 0.5, -LARGEST, noise_multiplier, source)
    spread_D = quantiles(np.abs(finite_ND - middle_D), weight_N, SPREAD, 0.0, noise_multiplier, source)
    # A column of mostly one value has no spread: its other values stay apart from it by at least 1.
    half_D = np.where(spread_D > 3e-4 * np.abs(middle_D) + SMALLEST, WIDTH * spread_D, 1.0)
    bounds_D2 = np.stack([middle_D - half_D, middle_D + half_D], axis=1)
    return Statistics(bounds_D2, ((Release(noise_multiplier, 1.0, len(count_U)), 1),))


def quantiles(x_ND: Values, weight_N: Values, p: float, least: float, sigma: float, source: RandomSource) -> Values:
    """Return private p-quantiles [D] above `least`; twice, they cost one release of `sigma`. See the notes."""
    columns = x_ND.shape[1]
    std = math.sqrt(2 * ROUNDS) * sigma * math.sqrt(columns) * max(p, 1 - p)
    low_D, high_D = np.full(columns, _position(least)), np.full(columns, _position(LARGEST))
    for _ in range(ROUNDS):
        middle_D = (low_D + high_D) / 2
        noise_D = np.concatenate([normals.copy() for normals in source.normals(columns, np.float64)])
        below_D = excess(x_ND, weight_N, p, _value(middle_D)) + std * noise_D < 0
        low_D, high_D = np.where(below_D, middle_D, low_D), np.where(below_D, high_D, middle_D)
    return _value((low_D + high_D) / 2)


def excess(x_ND: Values, weight_N: Values, p: float, at_D: Values) -> Values:
    """Return f [D] at `at_D`, without noise; see [Note: A noisy bisection]."""
    with np.errstate(invalid="ignore"):
        return weight_N @ (x_ND <= at_D) - p * (weight_N @ ~np.isnan(x_ND))


def _position(x: float) -> float:
    return math.copysign(math.log1p(abs(x) / SMALLEST), x)


def _value(position: Values) -> Values:
    return np.sign(position) * np.expm1(np.abs(position)) * SMALLEST
