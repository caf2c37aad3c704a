"""`dpshard audit`: attacks on a training configuration, and what they prove."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dpshard.cli import console, launch
from dpshard.cli.formats import to_json
from dpshard.cli.run_folder import RunFolder, write_atomically
from dpshard.cli.settings import MAY_CHANGE, TrainSettings, read_yaml, resolve, with_options
from dpshard.errors import ConfigurationError

if TYPE_CHECKING:
    from dpshard.backends.ranks import Ranks

REFUTED = 3
"""Exit code if an attack proved more than was accounted."""


class CanaryKind(str, Enum):  # noqa: UP042
    """See [Note: Canaries] in dpshard/audit/one_run.py."""

    gradient = "gradient"
    input = "input"


@with_options
def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder of `dpshard train`: its settings are audited, and audit.json is left in it.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Trials of the single step with the odd sample, and as many without; 0: no such audit.")
    ] = 1000,
    canaries: Annotated[int, typer.Option(help="Canaries of the audited run; 0: no such audit.")] = 1000,
    canary_kind: Annotated[
        CanaryKind,
        typer.Option(help="Canaries pull at numbers of their own (gradient), or are samples like no others (input)."),
    ] = CanaryKind.gradient,
    confidence: Annotated[float, typer.Option(help="Probability with which each lower bound holds.")] = 0.95,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings of `dpshard train`, which options override.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    **flags: Any,
) -> None:
    """Attack a training configuration, and prove lower bounds on its epsilon beside the accounted upper ones.

    Two attacks: many releases of one step with and without an odd sample; and one training run with canaries, each in
    it by the toss of a coin. Exit code 3 says that one of them proved more than was accounted: then something is wrong
    with the model, the loss or the engine. All settings of `dpshard train` are options.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if run is None:
        settings = resolve(read_yaml(config) if config else {}, given)
    elif given.keys() - set(MAY_CHANGE) or config:
        raise ConfigurationError(
            f"An audit of a run takes all settings but {' and '.join(MAY_CHANGE)} from its folder: leave the other "
            f"options out, or leave the folder out."
        )
    else:
        settings = replace(RunFolder.open(run).settings(), **given)
        as_json = as_json or RunFolder.open(run).audit
    if settings.shard.startswith("deepspeed"):
        raise ConfigurationError("DeepSpeed keeps gradients to itself: audit these settings with --shard fsdp2.")
    plan = {"trials": trials, "canaries": canaries, "canary-kind": canary_kind.value, "confidence": confidence}
    if settings.shard != "none" and not launch.joined():
        raise typer.Exit(_start(settings, plan, as_json))
    _audit(settings, plan, as_json)


def _start(settings: TrainSettings, plan: dict[str, Any], as_json: Path | None) -> int:
    """Have other processes do the work; their exit code."""
    from dpshard.cli.train import processes

    count = processes(settings)
    with tempfile.TemporaryDirectory(prefix="dpshard-") as scratch:
        config = Path(scratch) / "settings.yaml"
        config.write_text(replace(settings, nproc=count).to_yaml(), "utf-8")
        options = [text for name, value in plan.items() for text in (f"--{name}", str(value))]
        out = ["--json", str(as_json)] if as_json else []
        return launch.start(count, ["audit", "--config", str(config), *options, *out])


def _audit(settings: TrainSettings, plan: dict[str, Any], as_json: Path | None) -> None:
    with console.out.status("loading ..."):
        from dpshard.cli import training, world

    device = training.pick_device(settings.device)
    with world.joined(str(device)) as ranks:
        figures = _attack(replace(settings, device=str(device)), plan, ranks)
        if as_json is not None:
            target = as_json
            ranks.on_first(lambda: write_atomically(target, to_json(figures, 2).encode()))
        _print(figures)
        if any(figures[attack]["refuted"] for attack in ("step", "run") if attack in figures):
            raise typer.Exit(REFUTED)


def _attack(settings: TrainSettings, plan: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    import torch

    import dpshard
    from dpshard.cli import auditing, data

    samples = data.load(settings)
    figures: dict[str, Any] = {"task": settings.task, "model": settings.model}
    if plan["trials"]:
        with console.out.status("taking one step again and again ..."):
            figures["step"] = auditing.audit_step(settings, samples, plan["trials"], plan["confidence"])
    if plan["canaries"]:
        with ExitStack() as stack:
            count, kind = plan["canaries"], plan["canary-kind"]
            progress = _progress(stack, ranks)
            figures["run"] = auditing.audit_run(settings, samples, ranks, kind, count, plan["confidence"], progress)
    figures["shard"], figures["ranks"] = settings.shard, ranks.size
    return figures | {"versions": {"dpshard": dpshard.__version__, "torch": torch.__version__}}


def _progress(stack: ExitStack, ranks: Ranks) -> Any:
    if not ranks.first or not console.out.is_terminal:
        return None
    columns = (TextColumn("training with canaries"), BarColumn(), MofNCompleteColumn())
    bar = stack.enter_context(Progress(*columns, console=console.out, transient=True))
    task = bar.add_task("")
    return lambda step, steps: bar.update(task, completed=step, total=steps)


def _print(figures: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for attack in attacks(figures):
        table.add_row(f"[bold]{attack.name}[/]", attack.how)
        table.add_row("  proved", f"epsilon >= {attack.proved} with confidence {attack.confidence}")
        table.add_row("  accounted", f"epsilon <= {attack.accounted} at delta = {attack.delta}")
        table.add_row("  verdict", attack.verdict)
    console.out.print(Panel(table, title=f"audit · {figures['task']}", title_align="left", expand=False))


class Attack(NamedTuple):
    """What one attack found, in words."""

    name: str
    how: str
    proved: str
    accounted: str
    confidence: str
    delta: str
    refuted: bool

    @property
    def verdict(self) -> str:
        """What follows."""
        if self.refuted:
            return "REFUTED: the attack proves more than was accounted (chance of a false alarm: 1e-6)"
        return "consistent: the attack proves no more than was accounted"


def attacks(figures: Mapping[str, Any]) -> list[Attack]:
    """The attacks of audit.json."""
    from dpshard.accounting import rounded_up

    found = []
    for key, name in (("step", "one step"), ("run", "whole run")):
        if key not in figures:
            continue
        result = figures[key]
        how = (
            f"{result['trials']} trials that count, with and without one odd sample, in equal parts"
            if key == "step"
            else f"{result['canaries']} {result['kind']} canaries in {result['steps']} steps"
        )
        found.append(
            Attack(
                name,
                f"sigma = {result['noise_multiplier']:.4g}, {how}",
                f"{math.floor(result['lower_bound'] * 1e4) / 1e4:.4f}",  # rounded down: no more than was proved
                rounded_up(math.inf if result["accounted"] is None else result["accounted"]),
                f"{result['confidence']:g}",
                f"{result['delta']:g}",
                bool(result["refuted"]),
            )
        )
    return found
