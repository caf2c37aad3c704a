"""What each accountant can analyse, and epsilon, with a cache."""

from __future__ import annotations

import math
import warnings
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple, get_args

from dpshard.accounting.releases import Counts, Release
from dpshard.accounting.search import Search
from dpshard.config import AccountantName, require_choice, require_delta, require_probability
from dpshard.errors import AccountingError, ConfigurationError


def require_accountant(name: str) -> None:
    """Raise ConfigurationError unless `name` is an accountant of dpshard; warn once about "gdp"."""
    require_choice("accountant", name, get_args(AccountantName))
    if name == "gdp":
        _warn_of_gdp()


def require_supported(release: Release, accountant: str) -> None:
    """Raise AccountingError unless `accountant` can analyse `release`."""
    if release.allocated_steps is not None:
        _require_allocation(release, accountant)
    if release.max_rows_per_unit > 1:
        _require_units(release, accountant)
    if release.discretized_elements is not None:
        _require_discrete(release, accountant)
    if release.max_batch_size is not None and not accountant.startswith("pld"):
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse Poisson batches with a cap (max_batch_size="
            f"{release.max_batch_size}): take accountant='pld', or drop the cap."
        )
    if release.max_batch_size is not None:
        _mathematics().require_truncation()


def _require_allocation(release: Release, accountant: str) -> None:
    if not accountant.startswith("pld"):
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse random allocation (sampling='balls-in-bins'): take "
            f"accountant='pld'."
        )
    if release.max_batch_size is not None or release.discretized_elements is not None or release.max_rows_per_unit > 1:
        raise AccountingError(
            "Random allocation (sampling='balls-in-bins') is analysed for Gaussian noise, units of one sample, and "
            "without a cap: drop max_batch_size and max_rows_per_unit, and take noise='gaussian'."
        )


def _require_units(release: Release, accountant: str) -> None:
    if not accountant.startswith("pld"):
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse units of several samples (max_rows_per_unit="
            f"{release.max_rows_per_unit}), which are mixtures of Gaussians: take accountant='pld'."
        )
    if release.max_batch_size is not None or release.discretized_elements is not None:
        raise AccountingError(
            f"Units of several samples (max_rows_per_unit={release.max_rows_per_unit}) are analysed for Gaussian noise "
            f"and without a cap: drop max_batch_size, and take noise='gaussian'."
        )


def _require_discrete(release: Release, accountant: str) -> None:
    if accountant != "rdp":
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse discrete Gaussian noise (noise='discrete-gaussian'): "
            f"under sampling, only its Renyi divergences are proved. Take accountant='rdp', or noise='gaussian'."
        )
    if release.max_batch_size is not None:
        raise AccountingError(
            f"Discrete Gaussian noise (noise='discrete-gaussian') is not analysed for Poisson batches with a cap: drop "
            f"max_batch_size={release.max_batch_size}, or take noise='gaussian' and accountant='pld'."
        )
    if release.quantile_counts:
        raise AccountingError(
            "Discrete Gaussian noise (noise='discrete-gaussian') is not analysed together with the counts of "
            "adaptive_clipping, which get Gaussian noise: fix the thresholds, or take noise='gaussian'."
        )


def require_search(accountant: str) -> None:
    """Raise AccountingError unless `accountant` can analyse a search over runs."""
    if accountant != "rdp":
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse a search over runs: its theorem is on Renyi divergences. "
            f"Take accountant='rdp'."
        )


@cache
def _warn_of_gdp() -> None:
    warnings.warn(
        "accountant='gdp' is a central limit approximation: it may under-state epsilon. "
        "Report the figure of 'pld' or 'rdp', which are upper bounds.",
        stacklevel=4,
    )


class Bound(NamedTuple):
    """An epsilon and its accountant."""

    epsilon: float
    accountant: str
    """The requested accountant, or "rdp" if it is tighter than "pld"."""


def compute_epsilon(
    releases: Counts, target_delta: float, accountant: AccountantName = "pld", search: Search | None = None
) -> float:
    """Return the epsilon of `compute_bound`."""
    return compute_bound(releases, target_delta, accountant, search).epsilon


def compute_bound(
    releases: Counts, target_delta: float, accountant: AccountantName = "pld", search: Search | None = None
) -> Bound:
    """Return epsilon at `target_delta` of the `releases` of a run; inf without noise.

    "pld" returns the epsilon of "rdp" where that is smaller. With `search`, which needs "rdp", epsilon is that of the
    published run. Warns if delta is too large.
    """
    require_accountant(accountant)
    require_delta(target_delta, max((release.sample_size for release, _ in releases), default=1))
    return bound_of(releases, target_delta, accountant, search)


def epsilon_of(counts: Counts, delta: float, accountant: str, search: Search | None = None) -> float:
    """Return the epsilon of `bound_of`."""
    return bound_of(counts, delta, accountant, search).epsilon


@lru_cache(maxsize=512)
def bound_of(counts: Counts, delta: float, accountant: str, search: Search | None = None) -> Bound:
    """Return epsilon at `delta` of `counts` together: 0 for no release, inf without noise.

    `accountant` is an AccountantName or a value of DRAFTS. Raises ConfigurationError for an impossible delta,
    AccountingError for what the accountant cannot analyse.
    """
    require_probability("delta", delta)
    if not isinstance(search, Search | None):
        raise ConfigurationError(f"search={search!r}: pass a Search(mean_runs), or None for a single run.")
    if search is not None:
        require_search(accountant)
    releases = counts if search is None else sum(search.others, counts)
    for release, steps in releases:
        if steps != int(steps) or steps < 0:
            raise ConfigurationError(f"{steps!r} releases: a count is a whole number of at least 0.")
        require_supported(release, accountant)
    if not releases:
        return Bound(0.0, accountant)
    if any(release.noise_multiplier == 0 for release, _ in releases):
        return Bound(math.inf, accountant)
    if search is not None:
        return Bound(_mathematics().searched(counts, delta, search), accountant)
    return Bound(*_mathematics().tightest(counts, delta, accountant))


def _mathematics() -> ModuleType:
    # Imported late, because dp-accounting and scipy import slowly.
    from dpshard.accounting import composition

    return composition
