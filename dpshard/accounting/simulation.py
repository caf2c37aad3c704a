"""Privacy losses of balls in bins with correlated noise: an upper bound by a public simulation.

A sample of bin i takes part at the steps i, i + T, ...; i is uniform. Let u_t(i) be the sum of |c_{t-s}| over its steps
s <= t. Let K_ij be the sum over t of u_t(i) u_t(j). In units of R, the worst pair is Q = N(0, sigma^2 I) and P, which
adds u_t(i) to row t. A = dP/dQ is a mean of log-normal variables with covariances K / sigma^2, and divergences rise
with K. k branches have at most k K: sigma / sqrt(k). docs/accounting.md has the proofs (Choquette-Choo et al. 2024,
arXiv:2410.06266, for C >= 0).

[Note: Bins on a circle]
Let the rows be a circle of E T >= steps, where the columns of |C| run on at the beginning. That only adds to K, and
K'_ij depends on i - j mod T only. `overlaps` are K'_d / K'_0, rounded up; `scheme.sensitivity` is the root of K'_0.
What the matrix then lacks to be a covariance is added to its diagonal.

The loss is drawn: log A under P' with i = 0, and -log A under Q'. The mass above the k-th largest of N draws is Beta(k,
N - k + 1). It exceeds its quantile with probability `failure` only. From there on, the tail is at most Gaussian, with
the root of K'_0 over sigma as deviation (Borell 1975). SIMULATION_FAILURE covers both directions, all RANKS, and a grid
of sigma. So sigma, rounded down to it, may be chosen by the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy import special, stats

from dpshard.accounting.releases import SIMULATION_FAILURE, Counts, Release

Numbers = NDArray[np.float64]

SEED = 20
"""Fixed, so that every computation gives the same epsilon."""
DRAWS, NORMALS = 2**18, 2**26
"""Largest numbers of draws, and of normals for them."""
AT_ONCE = 2**19
"""Normals in memory at once."""
RANKS = (30, 100, 300, 1000, 3000, 10_000)
"""Ranks k of draws from which the tail is continued."""
RATIO, SIGMAS = 1.001, 20_000
"""Ratio of the grid of sigma, and a bound on its points between 1e-3 and 1e5."""
ERROR = 1e-9
"""Bound on the rounding of a drawn loss."""
REACH = 12.0
"""Number of standard deviations beyond which a Gaussian loss counts as infinite."""


class Tail(NamedTuple):
    """P(loss > t) <= 1 - Phi((t - mean) / deviation) for t >= start [ranks]."""

    start: Numbers
    mean: Numbers
    deviation: float

    def above(self, t: Numbers) -> Numbers:
        """Return a bound on the mass above each t [n]."""
        reached = t[:, None] >= self.start
        return np.where(reached, special.ndtr((self.mean - t[:, None]) / self.deviation), 1.0).min(1)


def losses(release: Release, interval: float) -> PrivacyLossDistribution:
    """Return the privacy losses of a run, rounded up to a grid."""
    remove, add = _tails(release.overlaps or (), release.epoch_steps, _rounded_down(release.noise_multiplier))
    return PrivacyLossDistribution(_on_grid(remove, interval), _on_grid(add, interval))


def _on_grid(tail: Tail, interval: float) -> pld_pmf.DensePLDPmf:
    first = math.floor(tail.start.min() / interval)
    last = math.ceil((tail.mean.max() + REACH * tail.deviation) / interval)
    above = tail.above(interval * np.arange(first, max(first, last) + 1))
    return pld_pmf.DensePLDPmf(interval, first, -np.diff(above, prepend=1.0), float(above[-1]), True)


def extent(counts: Counts) -> float:
    """Return a loss that a composition of these releases exceeds only with a tiny probability."""
    return sum(
        count * (release.noise_multiplier**-2 / 2 + REACH / release.noise_multiplier) for release, count in counts
    )


def _rounded_down(sigma: float) -> float:
    place = math.floor(math.log(sigma) / math.log(RATIO))
    return min(RATIO**place, sigma)


@lru_cache(maxsize=256)
def _tails(overlaps: tuple[float, ...], epoch_steps: int, sigma: float) -> tuple[Tail, Tail]:
    covariance = _circle(overlaps, epoch_steps) / sigma**2
    drawn = [np.concatenate(part) for part in zip(*_draw(covariance), strict=True)]
    remove, add = (_tail(np.sort(part + ERROR)[::-1], math.sqrt(covariance[0])) for part in drawn)
    return remove, add


def _tail(falling: Numbers, deviation: float) -> Tail:
    n = len(falling)
    ranks = [k for k in RANKS if 4 * k <= n]
    failure = SIMULATION_FAILURE / (2 * len(RANKS) * SIGMAS)
    start = falling[[k - 1 for k in ranks]]
    masses = stats.beta.isf(failure, ranks, [n - k + 1 for k in ranks])
    return Tail(start, start + deviation * special.ndtri(masses), deviation)


def _circle(overlaps: Sequence[float], epoch_steps: int) -> Numbers:
    """Return K' [T] of bin 0 with every bin, over K'_0."""
    half = np.asarray(overlaps)
    covariance = np.concatenate([half, half[1 : (epoch_steps + 1) // 2][::-1]])
    covariance[0] -= min(0.0, np.fft.fft(covariance).real.min())
    return covariance


def _draw(covariance: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield draws of log A under P', and of -log A under Q'."""
    T, random = len(covariance), np.random.default_rng(SEED)
    scale = np.sqrt(T * np.maximum(np.fft.fft(covariance).real, 0.0))
    shifted, half = np.exp(covariance - covariance[0]), covariance[0] / 2
    left = min(DRAWS, NORMALS // T) // 2
    while left > 0:
        rows = min(left, max(1, AT_ONCE // (2 * T)))
        left -= rows
        normals = random.standard_normal((rows, 2 * T)).view(np.complex128)
        fields = np.fft.ifft(normals * scale)
        for X in (fields.real, fields.imag):
            top = X.max(1)
            weights = np.exp(X - top[:, None])
            of_q = np.log(weights.mean(1)) + top - half
            yield np.log(weights @ shifted / T) + top + half, -of_q
