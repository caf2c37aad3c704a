"""Privacy losses of random allocation: every sample is in one random step of each epoch.

[Note: The pair of random allocation]
In units of R, Q is N(0, sigma^2 I_T); P adds 1 to coordinate I, uniform on the T steps. In its first n steps, P adds 1
only if I < n. docs/accounting.md proves that (P, Q) dominates both directions of an epoch.

Under Q, A = dP/dQ is the mean of T independent log-normal X_t = exp((x_t - 1/2) / sigma^2). It is summed on grids of
log A. Mass moves to the two neighbouring grid points with the same mean, which only raises divergences. Mass that is
cut off, at most TAIL at each end of each grid, counts as an infinite loss. The sums form a tree of 2 T nodes, so the
total is less than 8 T TAIL. Terms are positive, so masses are rounded by about T 2^-52, relatively.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy import special

Masses = NDArray[np.float64]

TAIL = 1e-20
"""Mass that is cut off at each end of a grid."""
ROUNDING = 1e-6
"""Bound on the relative rounding of masses, for T up to 2^30."""
FINENESS = 0.05
"""Largest grid interval over the standard deviation of log A."""


@dataclass(frozen=True, eq=False)
class Ratio:
    """A ratio A of mean 1, on the grid log A = interval * (first + i)."""

    interval: float
    first: int
    under_q: Masses
    """Masses [n] under Q; the rest of the mass has A = 0."""
    under_p: Masses
    """Masses [n] under P, A times `under_q`; the rest of the mass has infinite A."""

    @property
    def logs(self) -> Masses:
        """Log A [n] at the grid points."""
        return np.float64(self.interval) * np.arange(self.first, self.first + len(self.under_q), dtype=np.float64)

    def cut(self) -> Ratio:
        """Return it without tails of mass TAIL: the lower one under Q, the upper one under P."""
        start = int(np.searchsorted(np.cumsum(self.under_q), TAIL))
        stop = len(self.under_p) - int(np.searchsorted(np.cumsum(self.under_p[::-1]), TAIL))
        return Ratio(self.interval, self.first + start, self.under_q[start:stop], self.under_p[start:stop])

    def on(self, interval: float) -> Ratio:
        """Return it on another grid, with every mean unchanged."""
        if interval == self.interval:
            return self
        low, weights = _split(self.logs, interval)
        first, length = int(low[0]), int(low[-1] - low[0]) + 2
        under_q, under_p = np.zeros(length), np.zeros(length)
        for shift, of_q, of_p in weights:
            places = low - first + shift
            under_q += np.bincount(places, of_q * self.under_q, length)
            under_p += np.bincount(places, of_p * self.under_p, length)
        return Ratio(interval, first, under_q, under_p).cut()


def _split(logs: Masses, interval: float) -> tuple[NDArray[np.int64], list[tuple[int, Masses, Masses]]]:
    """Return the grid points below the values, and (shift, shares of mass under Q and under P) for both neighbours."""
    low = np.floor(logs / interval).astype(np.int64)
    above = np.clip(logs - low * interval, 0.0, interval)
    upper = np.expm1(above) / math.expm1(interval)
    return low, [
        (0, 1 - upper, (1 - upper) * np.exp(-above)),
        (1, upper, upper * np.exp(interval - above)),
    ]


def losses(
    noise_multiplier: float, epoch_steps: int, steps: int, interval: float, fineness: float = FINENESS
) -> PrivacyLossDistribution:
    """Return a bound on the privacy losses of the first `steps` steps of an epoch, on a grid."""
    ratio = allocation(noise_multiplier, epoch_steps, steps, fineness).on(interval)
    q, p = ratio.under_q, ratio.under_p
    last, cut_off = ratio.first + len(q) - 1, 8 * epoch_steps * TAIL
    remove = pld_pmf.DensePLDPmf(interval, ratio.first, p, cut_off, True)
    add = pld_pmf.DensePLDPmf(interval, -last, q[::-1].copy(), cut_off, True)
    return PrivacyLossDistribution(remove, add)


def interval(counts: Sequence[tuple[tuple[float, int, int], int]], grid_points: int) -> float:
    """Return a grid interval for the composition of (arguments of `allocation`, count)."""
    ratios = [(allocation(*arguments), count) for arguments, count in counts]
    finest, single = min(ratio.interval for ratio, _ in ratios), max(np.ptp(ratio.logs) for ratio, _ in ratios)
    # The mean loss is at most log(1 + the variance of A), and its variance is about the same.
    mean = sum(count * math.log1p(math.expm1(sigma**-2) * n / T**2) for (sigma, T, n), count in counts)
    return max(finest, (single + 2 * mean + 20 * math.sqrt(mean)) / grid_points)


def allocation(noise_multiplier: float, epoch_steps: int, steps: int, fineness: float = FINENESS) -> Ratio:
    """Return A of the first `steps` steps of an epoch."""
    ratio = mean_of(steps, noise_multiplier, fineness)
    if steps == epoch_steps:
        return ratio
    nothing = Ratio(ratio.interval, 0, np.ones(1), np.ones(1))
    return _mixed(ratio, steps, nothing, epoch_steps - steps, ratio.interval)


@lru_cache(maxsize=256)
def mean_of(n: int, sigma: float, fineness: float) -> Ratio:
    """Return the mean of `n` ratios of a Gaussian release each."""
    # The spread of log A for a log-normal of the variance of A (Fenton and Wilkinson).
    spread = math.sqrt(math.log1p(math.expm1(sigma**-2) / n))
    interval = 2.0 ** math.floor(math.log2(fineness * spread))
    if n == 1:
        return _gaussian(sigma, interval)
    return _mixed(mean_of(n // 2, sigma, fineness), n // 2, mean_of(n - n // 2, sigma, fineness), n - n // 2, interval)


def _gaussian(sigma: float, interval: float) -> Ratio:
    """Return the ratio of N(1, sigma^2) to N(0, sigma^2); log A ~ N(-1/2, 1) / sigma^2 in units of its deviation."""
    half = 1 / (2 * sigma)
    reach = -special.ndtri(TAIL / 4)
    first, last = math.floor((-half - reach) / sigma / interval), math.ceil((half + reach) / sigma / interval)
    logs = interval * np.arange(first, last + 1)
    q, p = _cells(sigma * logs + half), _cells(sigma * logs - half)
    # In a cell from a to b of mass q and mean m, (b - m) / (b - a) of the mass goes to a. Its mean is m = p / q.
    upper = np.clip((p * np.exp(-logs[:-1]) - q) / math.expm1(interval), 0.0, q)
    under_q = np.append(q - upper, 0.0)
    under_q[1:] += upper
    return Ratio(interval, first, under_q, np.exp(logs) * under_q).cut()


def _cells(edges: Masses) -> Masses:
    """Return the masses of a standard normal between `edges`, each computed from the nearer tail."""
    return np.where(edges[1:] > 0, -np.diff(special.ndtr(-edges)), np.diff(special.ndtr(edges)))


def _mixed(a: Ratio, m: int, b: Ratio, k: int, interval: float) -> Ratio:
    """Return (m A + k B) / (m + k) of independent A and B; their intervals are multiples of `interval`."""
    common = min(a.interval, b.interval)
    a, b = a.on(common), b.on(common)
    stride = round(common / interval)
    shrink = min(0, math.floor(math.log(min(m, k) / (m + k)) / interval)) - 1
    first = stride * min(a.first, b.first) + shrink
    length = stride * max(a.first + len(a.under_q), b.first + len(b.under_q)) + 2 - first
    out_q, out_p = np.zeros(length), np.zeros(length)

    def add(a: Ratio, m: int, b: Ratio, k: int, least: int) -> None:
        """Add the pairs in which A is at least `least` grid points above B."""
        least = max(least, a.first - b.first - len(b.under_q) + 1)
        most = a.first + len(a.under_q) - 1 - b.first
        if most < least:
            return
        distance = np.arange(least, most + 1)
        ratio = np.logaddexp(math.log(m), math.log(k) - distance * common) - math.log(m + k)
        low, weights = _split(ratio, interval)
        edges = np.flatnonzero(np.diff(low)) + 1
        for start, stop in zip([0, *edges], [*edges, len(low)], strict=True):
            begin = b.first + least + int(start) - a.first
            i0, i1 = max(0, begin), min(len(a.under_q), begin + len(b.under_q) + int(stop - start) - 1)
            if i1 <= i0:
                continue
            for shift, of_q, of_p in weights:
                kernel_q, kernel_p = of_q[start:stop], of_p[start:stop]
                place = stride * (a.first + i0) + int(low[start]) + shift - first
                out = slice(place, place + stride * (i1 - i0 - 1) + 1, stride)
                within = slice(i0 - begin, i1 - begin)
                out_q[out] += a.under_q[i0:i1] * np.convolve(b.under_q, kernel_q)[within]
                by_q, by_p = np.convolve(b.under_q, kernel_p)[within], np.convolve(b.under_p, kernel_p)[within]
                out_p[out] += (m * a.under_p[i0:i1] * by_q + k * a.under_q[i0:i1] * by_p) / (m + k)

    add(a, m, b, k, 0)
    add(b, k, a, m, 1)
    return Ratio(interval, first, out_q, out_p).cut()
