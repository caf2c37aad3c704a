"""Epsilon of composed privacy losses, by Fourier transforms whose rounding is bounded relative to delta.

[Note: Tilted composition]
A step has losses h j on a grid with masses p_j, and an infinite loss with mass m. Let p* be the convolution of all p.
Delta is at most the sum of all m, plus the sum over x > epsilon of (1 - exp(epsilon - x)) p*_x. Transforms err relative
to the *largest* masses. These are moved near epsilon: q_j = p_j exp(t j - c), with a sum of about 1. Exactly,

    p*_J = q*_J exp(C - t J),    C the sum of all c.

Any t >= 0 is sound. docs/accounting.md bounds what delta lacks by transforms (`_Spectrum.error`), the window
(`_Composed.above`), relative rounding (`_Composed.relative`), and rounded masses (`Losses.moved`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy import fft, optimize, special

from dpshard.errors import AccountingError

Floats = NDArray[np.float64]

SINGLE_ERROR = 2.0**-43
"""Bound on the rounding of a step's delta, relative to its mass of losses above epsilon."""
SINGLE_ABSOLUTE = 1e-22
"""Bound on the absolute part of that rounding."""
ROOT_ERROR = 1e-11
"""Bound on the error of a root, and of grid points below 10,000."""
LONGEST = 2**22
"""Length of the longest transform, which takes some 100 MB and a second."""
SLACK = 1e-6
"""Largest share of delta that the window may add."""
_UNIT = 2.0**-53
_LARGEST_EXPONENT = 300.0
_TILTS = np.geomspace(1e-3, 1e8, 300)


@dataclass(frozen=True, eq=False)
class Losses:
    """Privacy losses of a step, in one direction, on the grid interval * (first + i)."""

    interval: float
    first: int
    masses: Floats
    infinite: float
    error: float = SINGLE_ERROR

    @cached_property
    def sketch(self) -> tuple[Floats, Floats]:
        """Return a few losses and masses with about the same moments."""
        places = np.arange(self.first, self.first + len(self.masses))
        group = np.round(64 * np.arcsinh(places / 64)).astype(np.int64)
        starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
        masses = np.add.reduceat(self.masses, starts)
        means = np.add.reduceat(self.masses * places, starts)
        return self.interval * means[masses > 0] / masses[masses > 0], masses[masses > 0]

    def log_moment(self, order: float) -> float:
        """Return log E[exp(order * loss)] over finite losses."""
        exponents = order * self.interval * np.arange(self.first, self.first + len(self.masses))
        most = float(exponents[self.masses > 0].max())
        return most + math.log(float(np.exp(np.minimum(exponents - most, 0.0)) @ self.masses))

    def tilted(self, tilt: float, length: int, gap: int) -> tuple[Floats, float, float]:
        """Return masses times exp(tilt * place - c), place modulo `length`; c; and their relative rounding."""
        places = np.arange(self.first, self.first + len(self.masses))
        c = self.log_moment(tilt / self.interval)
        exponents = np.where(self.masses > 0, tilt * places - c, 0.0)
        rounding = _UNIT * (2 * tilt * float(np.abs(places).max()) + abs(c) + 9 + len(places) / length)
        tilted = np.bincount(places % length, self.masses * np.exp(exponents), length).astype(np.float64)
        return tilted + self.moved(tilt, gap) * np.roll(tilted, gap + 1), c, rounding

    def moved(self, tilt: float, gap: int) -> float:
        """Return r exp(tilt * (g + 1)), for g = `gap`."""
        return self.error / -math.expm1(-gap * self.interval) * math.exp(tilt * (gap + 1))


Steps = Sequence[tuple[Losses, int]]
"""Losses of distinct steps, on one grid, and their counts."""


def directions(step: PrivacyLossDistribution, error: float = SINGLE_ERROR) -> tuple[Losses, ...]:
    """Return the losses of `step` for a sample that is removed, and for one that is added if they differ."""
    try:
        given: Any = step
        both = (given._pmf_remove, given._pmf_add)
        distinct = both[:1] if both[0] is both[1] else both
        dense = [pmf.to_dense_pmf() for pmf in distinct]
        return tuple(Losses(p._discretization, p._lower_loss, p._probs, p._infinity_mass, error) for p in dense)
    except AttributeError as missing:
        raise AccountingError(
            f"The installed dp-accounting keeps privacy losses in another form ({missing}): install dp-accounting 0.6."
        ) from missing


def epsilon(steps: Steps, delta: float) -> float:
    """Return a bound on epsilon at `delta`; inf if `delta` is below the mass of infinite losses."""
    lost = sum(count * (losses.infinite + SINGLE_ABSOLUTE) for losses, count in steps)
    if lost >= delta:
        return math.inf
    composed = _compose(steps, *_window(steps, delta))

    def overspend(epsilon: float) -> float:
        return math.log((composed.delta(epsilon) + lost) / delta)

    least, most = max(0.0, float(composed.losses[0])), float(composed.losses[-1])
    if overspend(least) <= 0:
        return least and least + ROOT_ERROR
    if most <= least or overspend(most) > 0:
        return math.inf
    return cast(float, optimize.brentq(overspend, least, most, xtol=ROOT_ERROR / 4)) + ROOT_ERROR


@dataclass(frozen=True, eq=False)
class _Composed:
    """Masses of the sum of all losses, in a window."""

    losses: Floats
    factors: Floats
    """exp(C - t J) [L]."""
    tilted: Floats
    """Computed q* [L]."""
    error: float
    """Bound on the 2-norm of the errors of `tilted`."""
    relative: float
    """Bound on the log of the factor by which other rounding lowers delta."""
    above: float

    @cached_property
    def _masses(self) -> Floats:
        return self.factors * self.tilted

    @cached_property
    def _norms(self) -> Floats:
        return np.sqrt(np.cumsum(np.square(self.factors)[::-1])[::-1])

    def delta(self, epsilon: float) -> float:
        """Return a bound on delta at `epsilon`, without infinite losses."""
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        if start == len(self.losses):
            return self.above
        value = float(-np.expm1(epsilon - self.losses[start:]) @ self._masses[start:])
        return (max(value, 0.0) + float(self._norms[start]) * self.error) * math.exp(self.relative) + self.above


def _compose(steps: Steps, tilt: float, first: int, length: int, order: float) -> _Composed:
    interval = steps[0][0].interval
    gap = _gap(steps[0][0], order)
    log_factor = relative = 0.0
    above = -order * interval * (first + length)
    spectrum = _Spectrum(length)
    for losses, count in steps:
        masses, c, rounding = losses.tilted(tilt, length, gap)
        spectrum.multiply(masses, count)
        log_factor += count * c
        relative += count * rounding + 4 * _UNIT * count * abs(c)
        above += count * (losses.log_moment(order) + math.log1p(losses.moved(order * interval, gap)))
    places = np.arange(first, first + length, dtype=np.float64)
    exponents = log_factor - tilt * places
    return _Composed(
        losses=np.multiply(interval, places),
        factors=np.exp(np.minimum(exponents, _LARGEST_EXPONENT)),
        tilted=np.roll(spectrum.masses(), -(first % length)),
        error=spectrum.error(),
        relative=relative + 4 * _UNIT * (tilt * float(np.abs(places).max()) + length),
        above=math.exp(min(above, 0.0)),
    )


def _gap(losses: Losses, order: float) -> int:
    """Return g. A large g adds little mass, and a small g keeps a tilt from raising it much."""
    return max(1, round(min(1.0, 1 / order) / losses.interval))


class _Spectrum:
    def __init__(self, length: int) -> None:
        self._length = length
        self._accuracy = 12 * math.log2(length) * _UNIT
        self._product: NDArray[Any] = np.ones(length // 2 + 1, dtype=np.complex128)
        self._sizes, self._shares = np.ones(length // 2 + 1), np.zeros(length // 2 + 1)
        self._steps = 0

    def multiply(self, masses: Floats, count: int) -> None:
        """Multiply by the transform of `masses` [L] to the power of `count`."""
        base: Any = fft.rfft(masses)
        error = self._accuracy * float(masses.sum())
        sizes = np.abs(base) + error
        self._sizes *= sizes**count
        self._shares += count * error / sizes
        self._steps += count + 1
        while count:
            if count & 1:
                self._product *= base
            count >>= 1
            if count:
                base *= base

    def masses(self) -> Floats:
        return cast(Any, fft.irfft(self._product, self._length))

    def error(self) -> float:
        """Return a bound on the 2-norm of the errors of `masses()`; its factor 1.01 covers its own rounding."""
        lacking = self._sizes * (self._shares + math.expm1(math.sqrt(5) * _UNIT * self._steps))
        return 1.01 * (self._norm(lacking) + self._accuracy * self._norm(self._sizes + lacking))

    def _norm(self, sizes: Floats) -> float:
        return float(np.linalg.norm(sizes)) * math.sqrt(2 / self._length)


def _window(steps: Steps, delta: float) -> tuple[float, int, int, float]:
    """Return a tilt per grid point, a window (first point, length), and an order for the bound above it.

    Any choice is sound: this one is short enough, and near the best tilt for Renyi divergences.
    """
    interval = steps[0][0].interval
    budget = math.log(SLACK * delta)
    tilt, guess = _renyi(steps, delta)
    below = np.geomspace(1e-3, 1e3, 60)
    least = float(np.max((budget - _log_moments(steps, -below)) / below))
    while True:
        orders = tilt + min(tilt, 0.02 / interval) * np.geomspace(1e-2, 1e2, 60)
        ends = (_log_moments(steps, orders) - tilt * guess / 2 - budget) / (orders - tilt)
        best = int(np.argmin(ends))
        high = float(ends[best])
        # Masses below the window wrap to its top, where the tilt makes them small.
        low = least if least > 0 else max(least, min(0.0, high + budget / tilt))
        length = 2 ** max(4, math.ceil(math.log2(max(high - low, interval) / interval + 2)))
        if length <= LONGEST or tilt < _TILTS[0]:
            return tilt * interval, math.floor(low / interval), min(length, LONGEST), float(orders[best])
        tilt *= 0.8


def _renyi(steps: Steps, delta: float) -> tuple[float, float]:
    """Return the best tilt for Renyi divergences, and roughly its epsilon."""
    # arXiv:2004.00010, Prop. 12, at order 1 + tilt.
    tilts = _TILTS[steps[0][0].interval * _TILTS <= 1]  # the grid is too coarse for larger tilts
    log_terms = -math.log(delta) - np.log1p(tilts) - tilts * np.log1p(1 / tilts)
    epsilons = (_log_moments(steps, tilts) + log_terms) / tilts
    best = int(np.nanargmin(epsilons))
    return float(tilts[best]), max(0.0, float(epsilons[best]))


def _log_moments(steps: Steps, orders: Floats) -> Floats:
    total = np.zeros(len(orders))
    for losses, count in steps:
        points, masses = losses.sketch
        total += count * cast(Floats, special.logsumexp(np.outer(orders, points), axis=1, b=masses))
    return total
