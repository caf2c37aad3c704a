"""Private choice among runs: of a secret random number of runs the best one is published, the others are not.

Choosing hyper-parameters by looking at many private runs costs privacy even if all but one are thrown away. If the
number of runs is drawn from one of the distributions below, each with settings drawn at random, the outcome costs a
few times one run, however many there were; Papernot & Steinke 2022, arXiv:2110.03620.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dp_accounting import dp_event

from dpshard.config import check_choice, is_number
from dpshard.errors import ConfigurationError

RunsDistribution = Literal["poisson", "geometric", "logarithmic"]
_SHAPES: dict[RunsDistribution, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
"""Shape of the (truncated) negative binomial distribution of which each is a case or a limit."""


@dataclass(frozen=True, slots=True)
class Search:
    """How many runs there are, of which the best is published."""

    mean_runs: float
    """Expected number of runs, >= 1 (above 1, but for "poisson")."""
    distribution: RunsDistribution = "geometric"
    """Of the number of runs. A Poisson one may be 0, and then nothing may be published."""

    def __post_init__(self) -> None:
        check_choice("search distribution", self.distribution, get_args(RunsDistribution))
        mean, poisson = self.mean_runs, self.distribution == "poisson"
        if not (is_number(mean) and mean < math.inf and (mean > 1 or (poisson and mean == 1))):
            least = "of at least 1" if poisson else "above 1"
            raise ConfigurationError(
                f"mean_runs={mean!r}: the expected number of runs of a search (--search-runs) is a finite number "
                f"{least}. A single run needs no search."
            )

    def event(self, run: dp_event.DpEvent) -> dp_event.DpEvent:
        """The search in the terms of dp-accounting, where `run` is one of its runs."""
        return dp_event.RepeatAndSelectDpEvent(run, float(self.mean_runs), _SHAPES[self.distribution])
