"""Privacy losses of balls in bins with correlated noise: an upper bound by a public simulation.

[Note: The pair of correlated bins]
In all epochs each sample is in bin I, uniform on 0, ..., T - 1. It takes part at the steps I, I + T, ... There it
contributes g_s, |g_s| <= 1 in units of R, which may depend on earlier releases. Given I = i, it moves row t of C S + Z
by v_t(i). That is the sum of c_{t-s} g_s over its steps s <= t. See [Note: A run as one Gaussian mechanism] in
noise/correlation.py. Let u_t(i) be the sum of |c_{t-s}|, so |v_t(i)| <= u_t(i). Compare P, with the sample, and Q,
where it contributes zero. With the bins of all other samples fixed, and rows x_t ~ N(0, sigma^2) under Q, without what
the others add,

    A = dP/dQ = mean over i of a_i, a_i = product over t of exp((<v_t(i), x_t> - |v_t(i)|^2 / 2) / sigma^2).

Claim: no convex F has a larger E_Q F(A) than with numbers u_t(i) in place of v_t(i). F is a hockey stick of either
direction: (A - e^eps)+ or (1 - e^eps A)+.
- Kahane's inequality (1986, Israel J. Math. 55): let X and Y be centred Gaussian vectors with covariances K <= K' in
  every entry, and a_i >= 0. Then E F(sum of a_i exp(X_i - K_ii / 2)) <= E F(sum of a_i exp(Y_i - K'_ii / 2)). For, mix
  them: sqrt(1 - r) X + sqrt(r) Y with X and Y independent. Let w be the summands. The derivative by r of the mean of F
  is half the sum over i, j of (K'_ij - K_ij) E[w_i w_j F''(sum of w)]. No term is negative.
- Rows one by one, from the last. Suppose that from row t + 1 on, whatever was released, numbers u are worst. Given the
  rows before t, v_t is fixed, and <v_t(i), v_t(j)> <= u_t(i) u_t(j). The later rows are independent of x_t. So Kahane's
  inequality covers row t, too.
Joint convexity covers the mixture over the bins of the others. (Choquette-Choo et al. 2024, arXiv:2410.06266, have the
same pair for C >= 0.) A tree of branches has k leaves ([Note: Branches of a run] in courses.py). The rows of a path
have covariance K, so all rows have at most k K: sigma / sqrt(k).

[Note: Bins on a circle]
K_ij is the sum over t of u_t(i) u_t(j). Let the rows be a circle of E T >= steps. The columns of |C| run on beyond the
end, at the beginning. No product in K is lost, others only add, and the new K'_ij depends on i - j mod T only. By
Kahane's inequality, (P', Q') with K' dominates (P, Q). Now all bins are alike: under P', take I = 0. `overlaps` are
K'_d / K'_0; `course.sensitivity` is the root of K'_0. Overlaps are rounded up. What the matrix then lacks to be a
covariance is added to its diagonal.

[Note: What a simulation shows]
Draw N values of the loss, log A under P' (or -log A under Q'). As a function of independent standard normals, log A has
a gradient of norm at most l = root of K'_0 / sigma. The gradient is a mean of those of linear functions. So Gaussian
isoperimetry holds (Borell 1975; Sudakov and Tsirelson 1978). If P(loss > t) <= 1 - Phi(a), then P(loss > t + s) <= 1 -
Phi(a + s / l) for all s >= 0. Let t be the k-th largest of the N draws. The mass above it is Beta(k, N - k + 1), and
exceeds its quantile p with probability `failure` only. So beyond t the loss is at most Gaussian with deviation l. That
costs little: far out, one bin decides the loss.

FAILURE covers all of it: both directions, all RANKS, and every sigma of a grid with ratio RATIO. Sigma is rounded down
to the grid. So sigma may be chosen by the same draws. Delta of the guarantee includes FAILURE for each such release.
The draws have a fixed seed, so that all agree on epsilon. It stands for a seed that was chosen before anything else.
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
"""Of the public simulation."""
DRAWS, NORMALS = 2**18, 2**26
"""Draws at most, and normals at most that they take."""
AT_ONCE = 2**19
"""Normals in memory at once."""
RANKS = (30, 100, 300, 1000, 3000, 10_000)
"""Ranks k of draws from which the tail is continued; the best one counts."""
RATIO, SIGMAS = 1.001, 20_000
"""Ratio of the grid of sigma, and more than its points between 1e-3 and 1e5."""
ERROR = 1e-9
"""Bound on the rounding of a drawn loss."""
REACH = 12.0
"""Deviations of a Gaussian loss beyond which it counts as infinite: a mass of 2e-33."""


class Tail(NamedTuple):
    """P(loss > t) <= 1 - Phi((t - mean) / deviation) for t >= start, and also for the tails of other ranks."""

    start: Numbers
    """[ranks]."""
    mean: Numbers
    """[ranks]."""
    deviation: float

    def above(self, t: Numbers) -> Numbers:
        """Bound the mass above each t [n]."""
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
    """Return a loss that a composition of such releases hardly exceeds."""
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
    """Return K' [T] of bin 0 with every bin, over K'_0; see [Note: Bins on a circle]."""
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
        # Real and imaginary part are independent, each with this covariance.
        normals = random.standard_normal((rows, 2 * T)).view(np.complex128)
        fields = np.fft.ifft(normals * scale)
        for X in (fields.real, fields.imag):
            top = X.max(1)
            weights = np.exp(X - top[:, None])
            of_q = np.log(weights.mean(1)) + top - half
            yield np.log(weights @ shifted / T) + top + half, -of_q
