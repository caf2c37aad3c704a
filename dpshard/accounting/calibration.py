"""Before a run: the noise for a budget, and the number of steps that fit it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar, cast

from dpshard.accounting.bounds import epsilon_of, require_accountant, require_supported
from dpshard.accounting.mechanism import SampledMechanism
from dpshard.accounting.releases import Release
from dpshard.accounting.search import Search
from dpshard.config import AccountantName, BatchSchedule, require_delta, require_positive
from dpshard.errors import AccountingError

M = TypeVar("M", bound=SampledMechanism)

MIN_SIGMA, MAX_SIGMA = 0.05, 1e5
"""Range of noise multipliers that calibration searches."""
SIGMA_TOLERANCE = 1e-5
"""Relative tolerance of a noise multiplier; the result may be too large, never too small."""
MAX_STEPS = 2**24


def _require_upper_bound(accountant: str) -> None:
    if accountant == "gdp":
        raise AccountingError(
            "accountant='gdp' may under-state epsilon (for example 0.85 where 'pld' finds 3.24), so it cannot plan a "
            "budget: the noise would be too weak. Take accountant='pld'. With noise_multiplier= you may report the "
            "figure of 'gdp'."
        )


def calibrate(
    mechanism: M,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: AccountantName = "pld",
    search: Search | None = None,
) -> M:
    """Return `mechanism` with the smallest noise multiplier within the budget, to SIGMA_TOLERANCE.

    The computed epsilon never exceeds `target_epsilon`; with `search`, which needs "rdp", it is that of the search.
    Raises AccountingError if no noise is enough, and for "gdp".
    """
    require_accountant(accountant)
    require_positive("target_epsilon", target_epsilon)
    require_delta(target_delta, mechanism.sample_size)
    # By the central limit, epsilon is about mu^2 / 2 + mu sqrt(2 log(1 / delta)), mu^2 = variance (e^(1/sigma^2) - 1).
    plan = replace(mechanism, noise_multiplier=1.0).releases()
    for release, _ in plan:
        require_supported(release, accountant)
    _require_upper_bound(accountant)
    variance = sum(steps * release.sampled_variance for release, steps in plan)
    log_term = -2 * math.log(target_delta)
    mu = math.sqrt(log_term + 2 * target_epsilon) - math.sqrt(log_term)
    sigma = math.log1p(mu**2 / variance) ** -0.5
    for method in ("pld-draft", "pld") if accountant == "pld" else (accountant,):

        def epsilon_at(sigma: float, method: str = method) -> float:
            return epsilon_of(replace(mechanism, noise_multiplier=sigma).releases(), target_delta, method, search)

        sigma = _smallest_sigma(epsilon_at, target_epsilon, sigma)
    return replace(mechanism, noise_multiplier=sigma)


def calibrate_release(samples: int, *, target_epsilon: float, target_delta: float) -> Release:
    """Return one Gaussian release of all `samples`, with the least noise within the budget."""
    alone = SampledMechanism(schedule=BatchSchedule((samples,)), sample_size=samples)
    return calibrate(alone, target_epsilon=target_epsilon, target_delta=target_delta).release(0)


def _smallest_sigma(epsilon_at: Callable[[float], float], target_epsilon: float, guess: float) -> float:
    """Return the smallest sigma with epsilon_at(sigma) <= target_epsilon, or up to SIGMA_TOLERANCE more."""
    from scipy import optimize  # slow to import

    @cache
    def overspend(log_sigma: float) -> float:
        # Clamped, because the root finder rejects infinities.
        return math.log(min(max(epsilon_at(math.exp(log_sigma)) / target_epsilon, 1e-3), 1e3))

    least, most = math.log(MIN_SIGMA), math.log(MAX_SIGMA)
    lo = hi = min(max(math.log(guess), least), most)
    stride = 10 * SIGMA_TOLERANCE
    # Epsilon falls at least as fast as 1 / sigma, so a step by the factor of the overspend should cross the root.
    while overspend(hi) > 0:
        if hi >= most:
            raise AccountingError(
                f"No noise multiplier up to {MAX_SIGMA:g} has epsilon <= {target_epsilon:g} by this accountant. "
                f"Allow a larger epsilon or delta, train for fewer steps, or take the accountant 'pld'."
            )
        stride = max(2 * stride, overspend(hi))
        lo, hi = hi, min(hi + stride, most)
    while overspend(lo) <= 0:
        if lo <= least:
            return MIN_SIGMA
        stride = max(2 * stride, -overspend(lo))
        lo, hi = max(lo - stride, least), lo
    root = cast(float, optimize.brentq(overspend, lo, hi, xtol=SIGMA_TOLERANCE))
    while overspend(root) > 0:  # brentq may return too small a root
        root = min(root + SIGMA_TOLERANCE, hi)
    return math.exp(root)


def steps_for_epsilon(
    release: Release,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: AccountantName = "pld",
    search: Search | None = None,
) -> int:
    """Return the largest number of steps of `release` within the budget; 0 if one step exceeds it.

    With `search`, which needs "rdp", this is the number of steps of each run. Raises AccountingError for more than
    MAX_STEPS, and for "gdp".
    """
    require_accountant(accountant)
    _require_upper_bound(accountant)
    require_positive("target_epsilon", target_epsilon)
    require_delta(target_delta, release.sample_size)

    def fits(steps: int) -> bool:
        return epsilon_of(((release, steps),), target_delta, accountant, search) <= target_epsilon

    limit = 1024
    while (steps := largest_that_fits(fits, limit)) == limit:
        if limit >= MAX_STEPS:
            raise AccountingError(
                f"More than {MAX_STEPS} steps fit epsilon = {target_epsilon:g}: the noise is far more than needed. "
                f"Take a smaller noise_multiplier."
            )
        limit *= 2
    return steps


def largest_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest n in [0, limit] with fits(n), for monotone `fits`; 0 always fits."""
    if fits(limit):
        return limit
    few, many = 0, limit
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few
