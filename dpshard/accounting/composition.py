"""Epsilon of a multiset of releases, by the accountants "pld", "rdp" and "gdp".

`dp-accounting` computes privacy loss distributions ("pld": tight; composed in fourier.py) and Renyi divergences ("rdp":
quick, looser). The central limit approximation ("gdp") is no upper bound.

[Note: Discrete Gaussian noise under sampling]
At whole orders, and only there, its Renyi divergences are at most those of the sampled Gaussian, in both directions.
docs/accounting.md has the proof. None is known for privacy loss distributions.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp import compute_epsilon as compute_epsilon_of_rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from numpy.typing import NDArray
from scipy import optimize, special

from dpshard.accounting import allocation, fourier, mixtures, simulation
from dpshard.accounting.releases import SIMULATION_FAILURE, Counts, Relation, Release, relation_of
from dpshard.accounting.search import Search
from dpshard.config import require_probability

MAX_DISTINCT = 64
"""Largest number of distinct sampling probabilities; with more, neighbours are merged."""
MERGE_RATIO = 1.05
"""Ratio of neighbouring points of the grid of merged probabilities."""
GRID_POINTS = 2_000_000
"""Approximate length of the longest grid, which takes seconds and some 100 MB."""
LARGEST_LOSS = 2000.0
"""Epsilon by "pld", or mu by "gdp", above which epsilon is infinite."""
GAUSSIAN_ERROR = 2.0**-51
"""Bound on the error of delta of a Gaussian release."""

ROOT_ERROR = 1e-11
"""Bound on the error of a root of `gdp_epsilon`."""


def tightest(counts: Counts, delta: float, method: str) -> tuple[float, str]:
    """Return epsilon at `delta` of noisy `counts`, and the accountant that found it."""
    epsilon = _METHODS[method](counts, delta)
    compared = method == "pld" or (method == "pld-draft" and epsilon == math.inf)
    if compared and all(_is_plain(release) for release, _ in counts):
        renyi = _rdp_epsilon(counts, delta)
        if renyi < min(epsilon, LARGEST_LOSS):
            return renyi, "rdp"
    return epsilon, method


def _is_plain(release: Release) -> bool:
    return release.max_batch_size is None and release.max_rows_per_unit == 1 and release.allocated_steps is None


def event(release: Release) -> dp_accounting.DpEvent:
    """Return `release` as an event of dp-accounting; for discrete noise, valid only at whole orders."""
    if release.noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    if release.max_batch_size is None:
        gaussian = dp_accounting.GaussianDpEvent(release.accounted_noise_multiplier)
        return dp_accounting.PoissonSampledDpEvent(release.sampling_probability, gaussian)
    return dp_accounting.TruncatedSubsampledGaussianDpEvent(**_truncated(release))


def _truncated(release: Release) -> dict[str, Any]:
    return {
        "dataset_size": release.sample_size,
        "sampling_probability": release.sampling_probability,
        "truncated_batch_size": release.max_batch_size,
        "noise_multiplier": release.noise_multiplier,
    }


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return the least delta at which a mu-GDP mechanism is (epsilon, delta)-DP; arXiv:1905.02383, Cor. 1."""
    if mu == 0:
        return 0.0
    tail = math.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
    return float(special.ndtr(-epsilon / mu + mu / 2)) - tail


def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon at which a mu-GDP mechanism is (epsilon, delta)-DP.

    Raises ConfigurationError unless 0 < delta < 1.
    """
    require_probability("delta", delta)
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    most = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))  # by the tail of a normal
    return cast(float, optimize.brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, most))


def _gdp_epsilon(counts: Counts, delta: float) -> float:
    mu = math.hypot(*(math.sqrt(count) * release.loss_deviation for release, count in counts))
    return math.inf if mu > LARGEST_LOSS else gdp_epsilon(mu, delta)


def _rdp_epsilon(counts: Counts, delta: float, *, whole: bool = False) -> float:
    orders = _orders(counts, whole=whole)
    return float(compute_epsilon_of_rdp(orders, _curve(counts, orders), delta)[0])


def _curve(counts: Counts, orders: tuple[float, ...]) -> Any:
    return sum(count * _rdp_curve(release, orders) for release, count in _merged(counts))


def searched(counts: Counts, delta: float, search: Search) -> float:
    """Return epsilon of the outcome of `search`; a run releases `counts`, or one of `search.others`."""
    candidates = [candidate for candidate in (counts, *search.others) if candidate]
    orders = tuple(order for order in _orders(sum(candidates, start=())) if order > 1)
    worst = np.max([_curve(candidate, orders) for candidate in candidates], axis=0)
    return float(compute_epsilon_of_rdp(orders, _outcome(search, orders, worst).tolist(), delta)[0])


def _outcome(search: Search, orders: Sequence[float], run: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Renyi divergences of the outcome at increasing `orders` > 1; arXiv:2110.03620, Theorems 2 and 6."""
    at, mean = np.asarray(orders), float(search.mean_runs)
    choice = math.log(mean) / (at - 1)
    if search.distribution == "poisson":
        return (
            run
            + mean * np.array([compute_delta(orders, run.tolist(), math.log1p(1 / (a - 1)))[0] for a in at])
            + choice
        )
    shape, stop = (1, 1 / mean) if search.distribution == "geometric" else (0, logarithmic_stop(mean))
    curve = run + choice + (1 + shape) * np.min((1 - 1 / at) * run - math.log(stop) / at)
    return np.minimum.accumulate(curve[::-1])[::-1]  # divergences are non-decreasing in the order


def logarithmic_stop(mean: float) -> float:
    """Return p of the logarithmic distribution with this mean: P(k) is proportional to (1 - p)^k / k."""
    return cast(float, optimize.brentq(lambda p: (1 - 1 / p) / math.log(p) - mean, 1e-15, 1 - 1e-9, xtol=1e-18))


def _orders(counts: Counts, *, whole: bool = False) -> tuple[float, ...]:
    """Return the default orders of dp-accounting; for discrete noise, or if `whole`, only whole numbers."""
    orders: Any = RdpAccountant().orders
    whole = whole or any(release.discretized_elements is not None for release, _ in counts)
    return tuple(order for order in orders if order == int(order) or not whole)


@lru_cache(maxsize=1024)
def _rdp_curve(release: Release, orders: tuple[float, ...]) -> Any:
    with _quiet_about_orders():
        return RdpAccountant(orders).compose(event(replace(release, max_batch_size=None))).rdp


@contextmanager
def _quiet_about_orders() -> Iterator[None]:
    # dp-accounting warns about every order that it omits. To omit orders is sound.
    logger, drop = logging.getLogger("absl"), _DropWarnings()
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


class _DropWarnings(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING


def _pld_epsilon(counts: Counts, delta: float, coarseness: int = 1) -> float:
    if (exact := _exact_epsilon(counts, delta)) is not None:
        return exact
    counts = _merged(counts)
    interval = _interval(counts, delta)
    if interval is None:
        return math.inf
    rounding = allocation.ROUNDING if any(release.allocated_steps for release, _ in counts) else 0.0
    simulated = sum(count for release, count in counts if release.overlaps)
    certain = delta * (1 - rounding) - SIMULATION_FAILURE * simulated
    if certain <= 0:
        return math.inf
    relation = relation_of(release for release, _ in counts)
    both = [_directions(release, relation, interval * coarseness) for release, _ in counts]
    # A step with equal losses in both directions has one loss distribution.
    return max(
        fourier.epsilon(
            [(losses[min(way, len(losses) - 1)], n) for losses, (_, n) in zip(both, counts, strict=True)],
            certain,
        )
        for way in range(max(map(len, both)))
    )


def _exact_epsilon(counts: Counts, delta: float) -> float | None:
    """Return epsilon if `counts` are a single Gaussian release of all samples; else None."""
    (release, count), *others = counts
    capped, allocated = release.max_batch_size is not None, release.allocated_steps is not None
    if others or count > 1 or release.sampling_probability < 1 or capped or allocated:
        return None
    mu = release.max_rows_per_unit / release.noise_multiplier
    if mu > LARGEST_LOSS or delta <= GAUSSIAN_ERROR:
        return math.inf
    return gdp_epsilon(mu, delta - GAUSSIAN_ERROR) + ROOT_ERROR


def _merged(counts: Counts) -> Counts:
    """Round sampling probabilities up to a grid if more than MAX_DISTINCT of them belong to releases without a cap.

    Sampling at q is sampling at q' > q with part of the batch dropped. So no hockey-stick divergence is larger, by
    joint convexity. This argument does not hold with a cap.
    """
    mergeable = {release for release, _ in counts if release.max_batch_size is None and not release.allocated_steps}
    if len(mergeable) <= MAX_DISTINCT:
        return counts
    merged: Counter[Release] = Counter()
    for release, count in counts:
        if release in mergeable:
            rounded = MERGE_RATIO ** math.ceil(math.log(release.sampling_probability, MERGE_RATIO))
            release = replace(release, sampling_probability=min(1.0, rounded))
        merged[release] += count
    return tuple(merged.items())


def _interval(counts: Counts, delta: float) -> float | None:
    """Return the grid interval of the privacy losses; None if epsilon is beyond LARGEST_LOSS.

    Any grid gives an upper bound. A fifth of the standard deviation of a step's loss is within 1% of a finer one. Below
    1e-5, float rounding outweighs the gain.
    """
    simulated = tuple((release, count) for release, count in counts if release.overlaps)
    if simulated:
        extent = simulation.extent(simulated)
        others = tuple(each for each in counts if each not in simulated)
        interval = _interval(others, delta) if others else min(1e-4, 1e-3 / simulated[0][0].noise_multiplier)
        return None if interval is None or extent > LARGEST_LOSS else max(interval, extent / GRID_POINTS)
    if any(release.max_rows_per_unit > 1 for release, _ in counts):
        return mixtures.interval(counts, delta)
    if any(release.allocated_steps is not None for release, _ in counts):
        return allocation.interval([(_arguments(release), count) for release, count in counts], GRID_POINTS)
    extent = _rdp_epsilon(counts, delta, whole=True)
    if extent > LARGEST_LOSS:
        extent = _rdp_epsilon(counts, delta)
    for release, _ in counts:
        sensitivity_over_std = (1 if release.max_batch_size is None else 2) / release.noise_multiplier
        extent = max(extent, sensitivity_over_std**2 / 2 + 10 * sensitivity_over_std)
    if extent > LARGEST_LOSS:
        return None
    finest = 1e-4 if max(release.loss_deviation for release, _ in counts) >= 5e-4 else 1e-5
    return max(finest, 10.0 ** math.ceil(math.log10(extent / GRID_POINTS)))


@lru_cache(maxsize=MAX_DISTINCT)
def _directions(release: Release, relation: Relation, interval: float) -> tuple[fourier.Losses, ...]:
    error = fourier.SINGLE_ERROR
    if release.max_rows_per_unit > 1:
        error += mixtures.error(release, interval)
    return fourier.directions(_single(release, relation, interval), error)


def _single(release: Release, relation: Relation, interval: float) -> PrivacyLossDistribution:
    if release.max_rows_per_unit > 1:
        return mixtures.losses(release, interval)
    if release.overlaps is not None:
        return simulation.losses(release, interval)
    if release.allocated_steps is not None:
        return allocation.losses(*_arguments(release), interval)
    neighbours = NeighboringRelation[relation.upper().replace("-", "_")]
    grid = {"value_discretization_interval": interval, "neighboring_relation": neighbours}
    if release.max_batch_size is None:
        return privacy_loss_distribution.from_gaussian_mechanism(
            release.noise_multiplier, sampling_prob=release.sampling_probability, **grid
        )
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(**_truncated(release), **grid)


def _arguments(release: Release) -> tuple[float, int, int]:
    return release.noise_multiplier, release.epoch_steps, release.allocated_steps or 1


_METHODS: dict[str, Callable[[Counts, float], float]] = {
    "pld": _pld_epsilon,
    "pld-draft": partial(_pld_epsilon, coarseness=10),
    "rdp": _rdp_epsilon,
    "gdp": _gdp_epsilon,
}
