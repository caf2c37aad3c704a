"""`dpshard advise`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.markup import escape
from rich.table import Table

from dpshard.accounting import rounded_up
from dpshard.accounting.releases import in_figures
from dpshard.applications.cli import console, plots
from dpshard.applications.cli.options import described
from dpshard.applications.cli.run_folder import write_json

if TYPE_CHECKING:
    from dpshard.applications.advice import Advice


@described(
    "advise",
    target_epsilon={"names": ["--target-epsilon", "--epsilon"]},
    target_delta={"names": ["--target-delta", "--delta"]},
    plot={"metavar": "FILE.png"},
)
def command(
    sample_size: int,
    target_epsilon: float,
    target_delta: float | None = None,
    task: Literal["tabular", "vision", "language"] = "tabular",
    model: str | None = None,
    pretrained: bool = False,
    hours: float | None = None,
    samples_per_second: float | None = None,
    plot: Path | None = None,
    as_json: console.JsonFile = None,
) -> None:
    """Recommend a start: batch, steps, clipping, optimizer, learning rate, each with its source.

    It trains nothing, and reads no data, so it costs no privacy.

    For example: dpshard advise --sample-size 50000 --target-epsilon 3 --task vision
    """
    with console.err.status("computing ..."):
        from dpshard.applications.advice import advise

        advice = advise(
            sample_size=sample_size,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            task=task,
            model=model,
            pretrained=pretrained,
            hours=hours,
            samples_per_second=samples_per_second,
        )
    if as_json is not None:
        write_json(as_json, asdict(advice) | {"command": advice.command(), "code": advice.code()}, public=True)
    if plot is not None:
        draw(advice, plot)
    _print(advice)


def _print(advice: Advice) -> None:
    console.out.print(
        f"[bold]{advice.task}[/], N = {advice.sample_size:,} training samples, ε = {advice.target_epsilon:g}, "
        f"δ = {in_figures(advice.target_delta)}"
    )
    start = console.plain_table("Start", ("", ""))
    for name, value in _start(advice):
        start.add_row(name, escape(value))
    console.out.print(start)
    console.out.print(_trade_offs(advice))
    console.out.print("\n[bold]Why[/]")
    for reason in advice.reasons:
        console.out.print(f"• [bold]{reason.what}[/]: {escape(reason.why)} [dim]({escape(reason.source)})[/]")
    console.out.print("\n[bold]Next[/]")
    for sentence in advice.next_steps:
        console.out.print(f"• {escape(sentence)}")
    console.out.print("\n[bold]Command[/], with your file or folder after --data")
    console.out.print(escape(advice.command()))
    console.out.print("\n[bold]Code[/]")
    console.out.print(escape(advice.code()))


def _start(advice: Advice) -> Iterator[tuple[str, str]]:
    momentum = f", momentum {advice.momentum:g}" if advice.optimizer == "sgd" else ""
    yield "batch", f"{advice.batch_size:,} samples, expected"
    hours = "" if (time := _hours(advice, advice.epochs)) is None else f", {time:.3g} hours"
    yield "steps", f"{advice.steps:,} ({advice.epochs:.3g} epochs){hours}"
    yield "clipping", f"{advice.clipping_fn}, threshold {advice.max_grad_norm:g}, {advice.clipping_style}"
    yield "optimizer", f"{advice.optimizer}{momentum}"
    yield "learning rate", f"{advice.learning_rate:g}, {advice.lr_schedule}"
    yield "model", f"{advice.model}{', public weights' if advice.pretrained else ''}"
    yield "trains", advice.trains
    yield "noise", f"σ = {rounded_up(advice.noise_multiplier)}, from the budget"


def _hours(advice: Advice, epochs: float) -> float | None:
    if advice.samples_per_second is None:
        return None
    return epochs * advice.sample_size / advice.samples_per_second / 3600


def _trade_offs(advice: Advice) -> Table:
    names = ("batch", "σ", "σ / batch", "times the least", "epochs", *(["hours"] if advice.samples_per_second else []))
    table = console.plain_table(f"Noise against compute, in {advice.steps:,} steps", names, caption_justify="left")
    for row in advice.trade_offs:
        hours = [] if (time := _hours(advice, row.epochs)) is None else [f"{time:.3g}"]
        noise = rounded_up(row.noise_multiplier), f"{row.noise_per_batch:.3g}", f"{row.relative_noise:.2f}"
        style = "bold green" if row.batch_size == advice.batch_size else ""
        table.add_row(f"{row.batch_size:,}", *noise, f"{row.epochs:.3g}", *hours, style=style)
    table.caption = "The least has all samples in every batch."
    return table


def draw(advice: Advice, path: Path) -> None:
    """Draw sigma over batch against compute."""
    rows = advice.trade_offs
    start = next(row for row in rows if row.batch_size == advice.batch_size)
    with plots.styled():
        figure = plots.new_figure(figsize=(6.4, 4))
        ax = figure.subplots()
        ax.plot([row.epochs for row in rows], [row.noise_per_batch for row in rows], "o-", color=plots.COLOURS[0])
        ax.plot(start.epochs, start.noise_per_batch, "o", markersize=10, color=plots.COLOURS[1], label="start")
        for row in rows:
            place = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 8}
            ax.annotate(f"{row.batch_size:,}", (row.epochs, row.noise_per_batch), **place)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(f"compute: epochs, in {advice.steps:,} steps (points: expected batch)")
        ax.set_title(f"Noise per batch, σ / B, at ε = {advice.target_epsilon:g}")
        ax.legend()
        plots.save(figure, path)
