"""`dpshard audit`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.panel import Panel
from rich.table import Table

from dpshard.applications.cli import console, provenance
from dpshard.applications.cli.options import described, with_options
from dpshard.applications.cli.run_folder import write_json
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.cli.train import chosen, in_other_processes, on_all_ranks
from dpshard.errors import ConfigurationError, RunFolderError

if TYPE_CHECKING:
    from dpshard.backends.ranks import Ranks

REFUTED = 3
NAMES = {
    "releases": "releases",
    "step": "one step",
    "sampling": "sampling",
    "noise": "fresh noise",
    "runs": "short runs",
    "run": "whole run",
}
"""Names for users, by keys of audit.json."""
SAMPLINGS = {
    "poisson": "Poisson samples",
    "fixed-order": "in a fixed order",
    "cyclic-poisson": "Poisson samples of groups",
    "balls-in-bins": "balls in bins",
}
RELEASES = 200
FEWEST_TRIALS, FEWEST_CANARIES = 20, 10


@with_options
@described(
    "audit",
    trials={"min": 0},
    steps_per_trial={"min": 1, "max": 64},
    canaries={"min": 0},
)
def command(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder of `dpshard train`: audits its settings, and writes audit.json into it.",
        ),
    ] = None,
    trials: int = 1000,
    steps_per_trial: int = 1,
    canaries: int = 1000,
    canary_kind: Literal["gradient", "input"] = "gradient",
    confidence: float = 0.95,
    config: Path | None = None,
    as_json: console.JsonFile = None,
    **flags: Any,
) -> None:
    """Attack a training configuration, and prove lower bounds on its epsilon, to compare with the accounted one.

    The first attack makes releases nearly without noise. The second repeats
    steps, with and without an unusual sample. The third, for Poisson sampling,
    trains on canaries that a coin includes. Exit code 3: an attack proved more
    than the accounted epsilon. So the model, the loss or the engine is wrong. All
    settings of `dpshard train` are options.
    """
    settings, folder = chosen(config, flags, run)
    target = as_json or (folder and folder.audit)
    plan: dict[str, Any] = {
        "trials": trials, "steps-per-trial": steps_per_trial, "canaries": canaries, "canary-kind": canary_kind,
        "confidence": confidence,
    }  # fmt: skip
    _require_one_task(plan)
    if target is not None and not target.parent.is_dir():
        raise RunFolderError(f"The folder of --json {target} does not exist: make it first.")
    in_other_processes(settings, context)
    with on_all_ranks(settings) as (settings, ranks):
        figures = _attack(settings, plan, ranks)
        _print(figures)
        if target is not None:
            told = provenance.author() if target == (folder and folder.audit) else {}
            ranks.on_first(lambda: write_json(target, figures | told))
        if any(attack.refuted for attack in attacks(figures)):
            raise typer.Exit(REFUTED)


def _require_one_task(plan: Mapping[str, Any]) -> None:
    trials = FEWEST_TRIALS * (1 if plan["steps-per-trial"] == 1 else 2)
    for name, least in (("trials", trials), ("canaries", FEWEST_CANARIES)):
        if 0 < plan[name] < least:
            raise ConfigurationError(
                f"{name}={plan[name]} proves nothing: take at least {least}, preferably hundreds, or 0 to skip this "
                f"audit."
            )
    if not plan["trials"] and not plan["canaries"]:
        raise ConfigurationError("trials=0 and canaries=0 leave nothing to audit: drop one of the two.")
    if not 0 < plan["confidence"] < 1:
        raise ConfigurationError(
            f"confidence={plan['confidence']:g}: it is a probability, strictly between 0 and 1; for example 0.95."
        )


def _attack(settings: TrainSettings, plan: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    import torch

    import dpshard
    from dpshard.applications.cli import auditing, fitting, tasks

    if settings.group_column is not None:
        raise ConfigurationError("An audit does not support units of several rows yet: leave --group-column out.")
    by_canaries = plan["canaries"] and settings.sampling == "poisson"
    if not (by_canaries or plan["trials"]):
        raise ConfigurationError(
            f"sampling={settings.sampling!r}: a run with canaries is scored for Poisson samples only, and trials=0. "
            f"Give --trials, preferably hundreds."
        )
    if plan["canaries"] and not by_canaries and ranks.first:
        console.err.print(f"No run with canaries: it is scored for Poisson samples, not for {settings.sampling}.")
    samples = tasks.load(settings)
    settings = fitting.fit(settings, samples)
    figures: dict[str, Any] = {"task": settings.task, "model": settings.model}
    confidence, games = plan["confidence"], {}
    if plan["trials"]:
        games = auditing.games(plan["steps-per-trial"], settings)
        steps = min(RELEASES, 2 * plan["trials"])
        with console.progress("releases, nearly without noise", steps, speaking=ranks.first) as advance:
            figures["releases"] = auditing.audit_all_releases(settings, samples, ranks, steps, advance)
    for key, game in games.items():
        trials = plan["trials"] // len(games)
        title = f"{NAMES[key]}, again and again"
        with console.progress(title, 2 * trials * game.steps, speaking=ranks.first) as advance:
            figures[key] = auditing.audit_game(game, settings, samples, ranks, trials, confidence, advance)
    if by_canaries:
        with console.progress("training with canaries", None, speaking=ranks.first) as advance:
            figures["run"] = auditing.audit_run(
                settings, samples, ranks, plan["canary-kind"], plan["canaries"], confidence,
                lambda steps: advance(total=steps),
            )  # fmt: skip
    figures["shard"], figures["ranks"] = settings.shard, ranks.size
    return figures | {"versions": {"dpshard": dpshard.__version__, "torch": torch.__version__}}


def _print(figures: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for attack in attacks(figures):
        table.add_row(f"[bold]{attack.name}[/]", attack.how)
        if attack.proved:
            table.add_row("  proved", f"epsilon >= {attack.proved} with confidence {attack.confidence}")
            table.add_row("  accounted", f"epsilon <= {attack.accounted} at delta = {attack.delta}")
        table.add_row("  verdict", attack.verdict)
    console.out.print(Panel(table, title=f"audit · {figures['task']}", title_align="left", expand=False))


class Attack(NamedTuple):
    """Findings in words."""

    name: str
    how: str
    proved: str
    """Lower bound; "" for the attack on releases."""
    accounted: str
    confidence: str
    delta: str
    refuted: bool
    fault: str = ""

    @property
    def verdict(self) -> str:
        """The conclusion."""
        if self.refuted:
            found = self.fault or "the attack proves more than was accounted"
            return f"REFUTED: {found} (chance of a false alarm, in all attacks together: 1e-6)"
        if not self.proved:
            return "consistent: sums, noise and batches are those that were accounted"
        return "consistent: the attack proves no more than was accounted"


def attacks(figures: Mapping[str, Any]) -> list[Attack]:
    """Return the attacks of audit.json."""
    from dpshard.accounting import rounded_up
    from dpshard.accounting.releases import in_figures

    found = []
    for key, name in NAMES.items():
        if key not in figures:
            continue
        result = figures[key]
        if key == "releases":
            sums = f"the sums of {result['samples']} samples and " if result["samples"] else ""
            tested = f"{sums}the noise of {result['elements']:,} elements in {result['steps']} steps"
            how = f"sigma = {result['noise_multiplier']:.4g}, {result['tests']} tests of {tested}"
            found.append(Attack(name, how, "", "", "", "", bool(result["refuted"]), result["fault"] or ""))
            continue
        found.append(
            Attack(
                name,
                f"sigma = {result['noise_multiplier']:.4g}, {_how(result)}",
                f"{math.floor(result['lower_bound'] * 1e4) / 1e4:.4f}",  # a lower bound is rounded down
                rounded_up(math.inf if result["accounted"] is None else result["accounted"]),
                f"{result['confidence']:g}",
                in_figures(result["delta"]),
                bool(result["refuted"]),
            )
        )
    return found


def _how(result: Mapping[str, Any]) -> str:
    if "canaries" in result:
        return f"{result['canaries']} {result['kind']} canaries in {result['steps']} steps"
    sampled = ""
    if result["steps"] > 1:
        kind = SAMPLINGS[result.get("sampling", "poisson")]
        sampled = f" of {result['steps']} steps ({kind}, {result['batch_size']} of {result['sample_size']})"
    return f"{result['trials']} trials{sampled} count, half of them with one unusual sample"
