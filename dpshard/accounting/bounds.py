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
    kinds: list[tuple[str, str, str]] = []  # what needs an analysis of its own, its accountant, how to do without
    if release.allocated_steps is not None:
        kinds.append(("random allocation (sampling='balls-in-bins')", "pld", "take other sampling"))
    if (rows := release.max_rows_per_unit) > 1:
        kinds.append((f"units of several samples (max_rows_per_unit={rows})", "pld", "leave max_rows_per_unit out"))
    if release.discretized_elements is not None:
        kinds.append(("discrete Gaussian noise (noise='discrete-gaussian')", "rdp", "take noise='gaussian'"))
        if release.quantile_counts:
            kinds.append(("the counts of adaptive_clipping, which get Gaussian noise", "rdp", "fix the thresholds"))
    if (cap := release.max_batch_size) is not None:
        kinds.append(("Poisson batches with a cap", "pld", f"drop max_batch_size={cap}"))
    if not kinds:
        return
    (what, needed, without), *others = kinds
    if not accountant.startswith(needed):
        raise AccountingError(
            f"The accountant {accountant!r} cannot analyse {what}: take accountant={needed!r}, or {without}."
        )
    if others:
        other, _, without = others[0]
        raise AccountingError(f"{what[0].upper()}{what[1:]} cannot be analysed together with {other}: {without}.")


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

    `accountant` is an AccountantName, or "pld-draft", which is quicker and looser. Raises ConfigurationError for an
    impossible delta, AccountingError for what the accountant cannot analyse.
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
