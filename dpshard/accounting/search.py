"""Private choice among runs: their number is random and secret, and only the best run is published.

Settings are drawn at random, too. Then the outcome costs a few times one run (Papernot & Steinke 2022,
arXiv:2110.03620). If settings change the releases, a run costs as much as its worst candidate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dpshard.accounting.releases import Counts
from dpshard.config import is_number, require_choice
from dpshard.errors import ConfigurationError

RunsDistribution = Literal["poisson", "geometric", "logarithmic"]


@dataclass(frozen=True, slots=True)
class Search:
    """The distribution of the number of runs, and the releases of other settings."""

    mean_runs: float
    """Expected number of runs, above 1; for "poisson", at least 1."""
    distribution: RunsDistribution = "geometric"
    """A Poisson number of runs may be 0; then nothing is published."""
    others: tuple[Counts, ...] = ()
    """Releases of all other settings that a run may draw."""

    def __post_init__(self) -> None:
        require_choice("search distribution", self.distribution, get_args(RunsDistribution))
        mean, poisson = self.mean_runs, self.distribution == "poisson"
        if not (is_number(mean) and mean < math.inf and (mean > 1 or (poisson and mean == 1))):
            least = "of at least 1" if poisson else "above 1"
            raise ConfigurationError(
                f"mean_runs={mean!r}: the expected number of runs of a search (--search-runs) is a finite number "
                f"{least}. A single run needs no search."
            )
