"""Private choice among runs: a secret random number of runs, and only the best is published.

Choosing hyper-parameters by the results of private runs costs privacy. Draw the number of
runs from one of the distributions below, and the settings of each run at random. Then the outcome costs a few times
one run, for any number of runs; Papernot & Steinke 2022, arXiv:2110.03620.

Settings that change no release (a learning rate) cost nothing more. If noise, batch size or steps vary, one run is a
mixture over public settings. Its Renyi divergence is at most the largest of theirs, order by order. So a search costs
as much as its worst candidate; `others` must list the candidates.
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
    """The number of runs; the best one is published."""

    mean_runs: float
    """Expected number of runs, >= 1 (above 1, except for "poisson")."""
    distribution: RunsDistribution = "geometric"
    """Distribution of the number of runs. A Poisson number may be 0; then nothing is published."""
    others: tuple[Counts, ...] = ()
    """Releases of the other settings that a run may draw, each as of `SampledMechanism.releases`."""

    def __post_init__(self) -> None:
        require_choice("search distribution", self.distribution, get_args(RunsDistribution))
        mean, poisson = self.mean_runs, self.distribution == "poisson"
        if not (is_number(mean) and mean < math.inf and (mean > 1 or (poisson and mean == 1))):
            least = "of at least 1" if poisson else "above 1"
            raise ConfigurationError(
                f"mean_runs={mean!r}: the expected number of runs of a search (--search-runs) is a finite number "
                f"{least}. A single run needs no search."
            )
