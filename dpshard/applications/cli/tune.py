"""`dpshard tune`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from dpshard.applications.cli import console
from dpshard.applications.cli.formats import read_yaml
from dpshard.applications.cli.options import described, with_options
from dpshard.errors import ConfigurationError


@with_options
@described(
    "tune",
    search={"metavar": "SETTING=A,B,..."},
    jobs={"min": 1},
    resume={"metavar": "FOLDER"},
)
def command(
    search: list[str] | None = None,
    mean_runs: float = 8.0,
    distribution: Literal["geometric", "logarithmic", "poisson"] = "geometric",
    private_validation: bool = False,
    jobs: int = 1,
    config: Path | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    **flags: Any,
) -> None:
    """Search settings with differential privacy: the best of a random, secret number of trials.

    --target-epsilon is the budget of the whole search; each trial gets the noise
    for it. The folder holds the weights of the best trial (model.pt) and a report
    with the guarantee. The trials are removed: their number, scores and other
    weights are not covered. --resume continues.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if resume is not None and (search or out or config or given):
        raise ConfigurationError("--resume continues a search with its settings: leave the other options out.")
    with console.out.status("loading and calibrating the noise ..."):
        from dpshard.applications.cli import tuning

        if resume is None:
            how: dict[str, Any] = {"mean_runs": mean_runs, "distribution": distribution}
            base, choices = (read_yaml(config) if config else {}) | given, _choices(search or [])
            plan = tuning.plan(base, choices, **how, private_validation=private_validation)
            path = out or Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
            folder = tuning.SearchFolder.create(path, plan)
        else:
            folder, plan = tuning.SearchFolder.open(resume)
    with folder.locked():
        if folder.report.exists():
            folder.forget()
            console.out.print(f"The search has finished already: its report is {folder.report}.")
            return
        console.out.print(f"Searching {len(plan.candidates)} candidates in {folder.path}")
        tuning.run_trials(folder, plan, jobs)
        result = tuning.conclude(folder, plan)
    console.out.print(result["statement"])
    chosen = "nothing: no trial was drawn" if result["chosen"] is None else result["chosen"]
    console.out.print(f"Chosen: {chosen}. Weights and report: {folder.path}")


def _choices(search: Sequence[str]) -> dict[str, list[Any]]:
    """Parse "learning_rate=0.01,0.1" as candidates of a setting."""
    found: dict[str, list[Any]] = {}
    for text in search:
        name, separator, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not separator or not name or not values or name in found:
            raise ConfigurationError(f"--search {text!r}: write SETTING=A,B,..., once for each setting.")
        found[name] = [yaml.safe_load(value) for value in values.split(",")]
    if not found:
        raise ConfigurationError("--search is missing: name a setting and its candidates, learning-rate=0.01,0.03.")
    return found
