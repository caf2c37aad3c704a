"""Private choice among runs: of a secret random number of runs the best one is published, the others are not.

Choosing hyper-parameters by looking at many private runs costs privacy even if all but one are thrown away. If the
number of runs is drawn from one of the distributions below, each with settings drawn at random, the outcome costs a
few times one run, however many there were; Papernot & Steinke 2022, arXiv:2110.03620.

Settings that change no release (a learning rate) cost nothing more. Where noise, batch size or steps differ from run to
run, one run is a mixture over settings, which are public: its Renyi divergence is at most the largest of theirs, order
by order. So a search costs what its worst candidate costs, and `others` has to name the candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dpshard.accounting.releases import Counts
from dpshard.config import check_choice, is_number
from dpshard.errors import ConfigurationError

RunsDistribution = Literal["poisson", "geometric", "logarithmic"]


@dataclass(frozen=True, slots=True)
class Search:
    """How many runs there are, of which the best is published."""

    mean_runs: float
    """Expected number of runs, >= 1 (above 1, but for "poisson")."""
    distribution: RunsDistribution = "geometric"
    """Of the number of runs. A Poisson one may be 0, and then nothing may be published."""
    others: tuple[Counts, ...] = ()
    """What a run with other settings releases, as of `SampledMechanism.releases`: a run may draw these as well."""

    def __post_init__(self) -> None:
        check_choice("search distribution", self.distribution, get_args(RunsDistribution))
        mean, poisson = self.mean_runs, self.distribution == "poisson"
        if not (is_number(mean) and mean < math.inf and (mean > 1 or (poisson and mean == 1))):
            least = "of at least 1" if poisson else "above 1"
            raise ConfigurationError(
                f"mean_runs={mean!r}: the expected number of runs of a search (--search-runs) is a finite number "
                f"{least}. A single run needs no search."
            )
