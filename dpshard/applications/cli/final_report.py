"""The final report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import dpshard
from dpshard.accounting import rounded_up
from dpshard.accounting.releases import in_figures
from dpshard.accounting.risk import profile
from dpshard.applications.cli.formats import NEIGHBOURS
from dpshard.applications.cli.run_folder import RunFolder, write_atomically, write_json
from dpshard.applications.cli.training import Run

NOT_COVERED = (
    "metrics.jsonl and the plots (loss, clip fraction, norms, gradient-SNR, realised batch sizes): computed from the "
    "training samples, without noise.",
    "checkpoints: they hold the run secret, with which a reader can subtract the noise. Protect them like the data, "
    "and publish only model.pt.",
    "the validation and test samples and their scores: not trained on, but not protected either.",
    "choices between runs on the same data: each of the other runs costs epsilon, too.",
    "the number of training samples, the set of labels, and the names and kinds of columns: public by assumption.",
)


_OF_MECHANISM = (
    "target_epsilon max_batch_size noise_multiplier noise discretized_elements max_grad_norm sample_size accountant "
    "sensitivity"
).split()

Rows = list[tuple[str, ...]]


def collect(run: Run, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the report as plain values."""
    data, engine, mechanism, settings = run.data, run.engine, run.engine.mechanism, run.settings
    sampling, samples, correlation = mechanism.sampling, mechanism.sample_size, mechanism.noise_correlation
    if sampling == "poisson":
        sampling = "truncated Poisson" if mechanism.max_batch_size else "Poisson"
    phases: list[dict[str, Any]] = [
        {"expected_batch_size": batch, "sampling_probability": batch / samples, "steps": steps}
        for batch, steps in mechanism.schedule.phases()
    ]
    if mechanism.sampling != "poisson":
        phases = [phase | {"sampling_probability": None} for phase in phases]
    privacy = {"epsilon": engine.epsilon(), "delta": mechanism.target_delta, "steps": engine.step, "phases": phases}
    privacy |= {"profile": profile(engine.epsilon) if mechanism.noise_multiplier else [], "sampling": sampling}
    privacy |= {"protected_unit": data.sample, "neighbouring_relation": mechanism.relation}
    privacy |= {"noise_correlation": None if correlation is None else repr(correlation)}
    privacy |= {name: getattr(mechanism, name) for name in _OF_MECHANISM}
    privacy |= {name: getattr(settings, name) for name in ("clipping_fn", "clipping_style", "clipping_quantile")}
    privacy |= {"earlier": [[release.noise_multiplier, count] for release, count in mechanism.earlier]}
    result: dict[str, Any] = {"task": settings.task, "model": settings.model, "parameters": run.sharded.parameters}
    return result | {
        "samples": {"train": len(data.train), "validation": len(data.validation), "test": len(data.test)},
        "test": dict(scores) | ({} if data.guessing is None else {"guessing": data.guessing}),
        "privacy": privacy | {"statement": engine.statement(), "not_covered": list(NOT_COVERED)},
        "versions": {"dpshard": dpshard.__version__, "torch": torch.__version__},
        "device": run.device.type,
        "ranks": run.ranks.size,
        "shard": settings.shard,
    }


def write(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Write report.json and report.md."""
    write_json(folder.report.with_suffix(".json"), report)
    results, guarantee, mechanism = rows(report)
    page = rendered("md", r=report, results=results, guarantee=guarantee, mechanism=mechanism)
    write_atomically(folder.report, page.encode())


def show(console: Console, folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Print results, guarantee, and paths."""
    table = Table.grid(padding=(0, 2))
    for name, value in chain(*rows(report)):
        table.add_row(f"[bold]{name}[/]", value)
    console.print(Panel(table, title=f"{report['task']} · {report['model']}", title_align="left", expand=False))
    console.print(f"Report, plots and weights: {folder.path}  (what epsilon does not cover: {folder.report})")


def rows(report: Mapping[str, Any]) -> list[Rows]:
    """Return rows of the results, the guarantee and the mechanism."""
    parts = rendered("rows", r=report).split("\n\n")
    return [[tuple(line.split(": ", 1)) for line in part.splitlines()] for part in parts]


def rendered(name: str, filters: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Return a template, filled."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=lambda template: template == "report.html.jinja",
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"f": format, "up": rounded_up, "figures": in_figures, **(filters or {})}
    try:
        return environment.get_template(f"report.{name}.jinja").render(neighbours=NEIGHBOURS, **values)
    except jinja2.UndefinedError as error:
        raise ValueError(str(error)) from error
