"""Tests that a release minus its clipped sum is the accounted noise.

Noise over its accounted deviation is standard normal, and independent. Tests share one probability of a false alarm
(Bonferroni).
- Deviation: sums of squares are chi-squared.
- Distribution: inequality of Dvoretzky, Kiefer and Wolfowitz (Massart 1990).
- Independence (Chernoff): a sum of m products of independent normals exceeds s with a bounded probability. It is at
most exp(-t s - m log(1 - t^2) / 2), t in (0, 1). In chains neighbours share a factor, so every other product is bounded
at s / 2.
- Grid: of floats with 24 random bits hardly two are equal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft, stats

from dpshard.noise.correlation import BandedInverse, BandMF

STEPS_APART = 8
KEPT = 2**15
COMPARED = 2**11
ENGINE_STEPS = 8
STRETCH = 256
TRANSFORMED = 2**23
GRID_VALUES, FEWEST_GRID_VALUES = 4096, 256
LEAST_LOG_P = -700.0
_EDGES = np.linspace(-6, 6, 121)

Noise = Mapping[str, NDArray[np.float64]]
"""Noise over its accounted deviation, flattened, by parameter."""


class Finding(NamedTuple):
    """Tests with a p-value."""

    what: str
    log_p: float
    """Log of a bound on its probability for a sound engine."""


def likeliest_fault(findings: list[Finding], false_alarm: float) -> Finding | None:
    """Return the least probable finding below `false_alarm`, or None."""
    worst = min(findings, key=lambda finding: max(finding.log_p, LEAST_LOG_P))
    return worst if worst.log_p + math.log(len(findings)) < math.log(false_alarm) else None


def log_tail_of_products(total: NDArray[np.float64], m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bound log P(|sum of m products of independent normals| >= |total|)."""
    s = np.maximum(np.abs(total), 1e-300)
    t = np.minimum((np.hypot(m, 2 * s) - m) / (2 * s), 1 - 1e-15)
    return np.minimum(math.log(2) - t * s - m / 2 * np.log1p(-(t**2)), 0.0)


def _log_tail_of_chains(total: NDArray[np.float64], m: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.minimum(math.log(2) + log_tail_of_products(total / 2, m), 0.0)


class _Parameter:
    def __init__(self, n: int) -> None:
        self.n = n
        self.squares = np.zeros(n)
        self.spectrum = np.zeros(_transform_length(n) // 2 + 1)
        self.transformed = 0
        self.before: deque[NDArray[np.float64]] = deque(maxlen=STEPS_APART)
        self.across_steps, self.pairs_of_steps = np.zeros(STEPS_APART), np.zeros(STEPS_APART)

    def see(self, z: NDArray[np.float64]) -> None:
        self.squares += z * z
        if self.transformed * self.n < TRANSFORMED:
            length = _transform_length(self.n)
            self.spectrum += np.abs(np.fft.rfft(z, length)) ** 2
            self.transformed += 1
        kept = z[:KEPT].copy()
        for back, other in enumerate(reversed(self.before)):
            self.across_steps[back] += kept @ other
            self.pairs_of_steps[back] += len(kept)
        self.before.append(kept)

    def findings(self, name: str, steps: int) -> list[Finding]:
        found = [
            Finding(
                f"{name}: the noise does not have the accounted deviation",
                _log_chi2(self.squares.sum(), self.n * steps),
            ),
            self._weakest(f"{name}: a stretch has hardly any noise", steps, STRETCH),
            self._weakest(f"{name}: an element has hardly any noise", steps, 1),
        ]
        if steps > 1:
            log_p = _log_tail_of_chains(self.across_steps, self.pairs_of_steps)
            found.append(_least(f"{name}: the noise of a step is used again at a later one", log_p))
        if self.n > 1:
            length = _transform_length(self.n)
            sums = np.fft.irfft(self.spectrum, length)[1 : self.n]
            m = (self.n - np.arange(1.0, self.n)) * self.transformed
            found.append(_least(f"{name}: elements share noise", _log_tail_of_chains(sums, m)))
        return found

    def _weakest(self, what: str, steps: int, stretch: int) -> Finding:
        starts = np.arange(0, self.n, stretch)
        sizes = np.diff(np.append(starts, self.n))
        log_p = stats.chi2.logcdf(np.add.reduceat(self.squares, starts), sizes * steps)
        return _least(what, log_p)


class NoiseTests:
    """Tests of all steps."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.steps = 0
        self._parameters = {name: _Parameter(n) for name, n in sizes.items()}
        self._names = list(sizes)
        self._products = np.zeros((len(sizes), len(sizes)))
        self._histogram = np.zeros(len(_EDGES) + 1)
        self._first_engine: list[NDArray[np.float64]] = []
        self._second_engine: list[float] = []
        self._grid: NDArray[np.float64] = np.zeros(0)
        self._engines = 1
        self._step_of_engine = 0

    def see(self, noise: Noise, *, alone: bool) -> None:
        """Add a step; `alone` if the release held only noise, with all its last bits."""
        heads = np.zeros((len(self._names), COMPARED))
        for row, name in enumerate(self._names):
            z = noise[name]
            self._parameters[name].see(z)
            heads[row, : min(len(z), COMPARED)] = z[:COMPARED]
            self._histogram += np.bincount(np.searchsorted(_EDGES, z), minlength=len(_EDGES) + 1)
            if alone and len(self._grid) < GRID_VALUES:
                self._grid = np.append(self._grid, z[: GRID_VALUES - len(self._grid)])
        self._products += heads @ heads.T
        if self._engines == 1 and self._step_of_engine < ENGINE_STEPS:
            self._first_engine.append(heads)
        elif self._engines == 2 and self._step_of_engine < len(self._first_engine):
            self._second_engine.append(float((heads * self._first_engine[self._step_of_engine]).sum()))
        self.steps += 1
        self._step_of_engine += 1

    def next_engine(self) -> None:
        """Begin another engine."""
        self._engines += 1
        self._step_of_engine = 0
        for parameter in self._parameters.values():
            parameter.before.clear()

    def findings(self) -> list[Finding]:
        """Return all tests."""
        found = [f for name, p in self._parameters.items() for f in p.findings(name, self.steps)]
        return [*found, self._distribution(), *self._grid_test(), *self._across_parameters(), *self._across_engines()]

    def _distribution(self) -> Finding:
        values = self._histogram.sum()
        farthest = np.abs(np.cumsum(self._histogram)[:-1] / values - stats.norm.cdf(_EDGES)).max()
        return Finding("the noise is not normal", min(0.0, math.log(2) - 2 * values * farthest**2))

    def _grid_test(self) -> list[Finding]:
        values = len(self._grid)
        if values < FEWEST_GRID_VALUES:
            return []
        equal = values - len(np.unique(self._grid))
        # The grid of floats is finer near 0.
        log_p = float(stats.poisson.logsf(equal - 1, values**2 / 2 * 2.0**-24)) if equal else 0.0
        return [Finding("the noise lies on a coarse grid, like that of half precision", log_p)]

    def _across_parameters(self) -> list[Finding]:
        sizes = np.minimum([p.n for p in self._parameters.values()], COMPARED)
        pairs = np.triu_indices(len(sizes), 1)
        if not len(pairs[0]):
            return []
        m = np.minimum(sizes[pairs[0]], sizes[pairs[1]]) * float(self.steps)
        log_p = log_tail_of_products(self._products[pairs], m)
        at = int(log_p.argmin())
        names = self._names[pairs[0][at]], self._names[pairs[1][at]]
        return [_least(f"{names[0]} and {names[1]} share noise", log_p)]

    def _across_engines(self) -> list[Finding]:
        if not self._second_engine:
            return []
        m = sum(min(p.n, COMPARED) for p in self._parameters.values()) * len(self._second_engine)
        log_p = log_tail_of_products(np.array([sum(self._second_engine)]), np.array([float(m)]))
        return [Finding("two engines draw the same noise, as from a seed in the script", float(log_p[0]))]


def _transform_length(n: int) -> int:
    """Return a length at which products do not wrap around."""
    return int(fft.next_fast_len(2 * n, real=True))  # type: ignore[arg-type]


def _log_chi2(total: float, degrees: int) -> float:
    tails = stats.chi2.logcdf(total, degrees), stats.chi2.logsf(total, degrees)
    return min(0.0, math.log(2) + float(min(tails)))


def _least(what: str, log_p: NDArray[np.float64]) -> Finding:
    return Finding(what, min(0.0, float(np.min(log_p)) + math.log(len(log_p))))


class Whitening:
    """Undoes a correlation, step by step.

    Released noise n_t is z_t + w_1 z_{t-1} + ...; in a BandMF, z_t = n_t + c_1 n_{t-1} + ... has fewer terms.
    """

    def __init__(self, correlation: BandedInverse | BandMF, steps: int) -> None:
        self._of_noise = isinstance(correlation, BandedInverse)
        weights = correlation.noising(steps) if self._of_noise else correlation.strategy(steps)
        self._weights = weights[: correlation.bands]
        self._earlier: deque[Noise] = deque(maxlen=len(self._weights) - 1)

    @property
    def is_plain(self) -> bool:
        """True if the noise is independent already."""
        return len(self._weights) == 1

    def independent(self, noise: Noise) -> Noise:
        """Return the z of the next step."""
        sign = -1.0 if self._of_noise else 1.0
        found = dict(noise)
        for weight, earlier in zip(self._weights[1:], reversed(self._earlier), strict=False):
            found = {name: z + sign * weight * earlier[name] for name, z in found.items()}
        self._earlier.append(found if self._of_noise else noise)
        return found
