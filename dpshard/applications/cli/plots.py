"""`dpshard plot`, and the style of all plots."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.applications.cli import console
from dpshard.applications.cli.run_folder import RunFolder
from dpshard.applications.extras import require
from dpshard.errors import RunFolderError

COLOURS = ("#2a5caa", "#d1495b", "#2e8b57")
DPI = 150
STYLE: Any = {"axes.titlelocation": "left", "axes.titleweight": "bold"}
STYLE |= {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "axes.titlepad": 10}
STYLE |= {"axes.titlesize": 11, "figure.constrained_layout.h_pad": 0.1, "figure.constrained_layout.use": True}
STYLE |= {"font.size": 10, "grid.alpha": 0.25, "legend.frameon": False, "lines.linewidth": 1.8}


@dataclass(frozen=True)
class Panel:
    """A plot of metrics over the step."""

    name: str
    title: str
    series: Mapping[str, str]
    """Legends by metric."""
    percent: bool = False
    log: bool = False


PANELS = (
    Panel("loss", "Loss", {"loss": "training (not private)", "validation_loss": "validation"}),
    Panel("accuracy", "Validation accuracy", {"validation_accuracy": "validation"}, percent=True),
    Panel("r2", "Validation R²", {"validation_r2": "validation"}),
    Panel("perplexity", "Validation perplexity", {"validation_perplexity": "validation"}, log=True),
    Panel("epsilon", "Privacy spent: ε", {"epsilon": "ε"}),
    Panel("clip_fraction", "Samples above the clipping norm", {"clip_fraction": "clip fraction"}, percent=True),
    Panel("gradient_snr", "Gradient-SNR: clipped sum / noise", {"gradient_snr": "SNR"}),
    Panel("learning_rate", "Learning rate", {"learning_rate": "learning rate"}),
)


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train`, finished or not.")],
) -> None:
    """Draw loss, accuracy, epsilon, clip fraction and gradient-SNR of a run as PNG in RUN/plots."""
    for path in draw(RunFolder.open(run)):
        console.out.print(str(path))


def new_figure(**arguments: Any) -> Any:
    """Return a matplotlib figure, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(**arguments)


def draw(folder: RunFolder) -> list[Path]:
    """Draw plots/overview.png, and a picture of each panel."""
    rows = folder.read_metrics()
    if not rows:
        raise RunFolderError(f"{folder.metrics} is empty: the run has not finished a step yet.")
    panels = _with_points(rows)
    pictures = {"overview": panels} | {panel.name: [panel] for panel in panels}
    paths = {name: folder.plots / f"{name}.png" for name in pictures}
    for name, path in paths.items():
        with suppress(OSError):  # save raises it again
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
        save(_figure(pictures[name], rows, folder.settings().target_epsilon), path)
    return list(paths.values())


def svgs(rows: Sequence[Mapping[str, Any]], target_epsilon: float | None) -> dict[str, str]:
    """Return an <svg> element for each panel with points."""
    return {panel.name: _svg(_figure([panel], rows, target_epsilon), panel.name) for panel in _with_points(rows)}


def _with_points(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    return [panel for panel in PANELS if any(_points(rows, metric)[0] for metric in panel.series)]


def _svg(figure: Any, name: str) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # reproducible
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    element = "<svg " + text.getvalue().partition("<svg ")[2]
    # Names of parts must differ between the pictures of a page.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)


def save(figure: Any, path: Path) -> Path:
    """Write a picture."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"The picture {path} cannot be written: {error}") from error
    return path


def _figure(panels: Sequence[Panel], rows: Sequence[Mapping[str, Any]], target_epsilon: float | None) -> Any:
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    with styled():
        figure = new_figure(figsize=(4.4 * columns, 3.2 * lines))
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for panel, ax in zip(panels, axes, strict=False):
            _draw_panel(ax, panel, rows)
            if panel.name == "epsilon" and target_epsilon is not None:
                ax.axhline(target_epsilon, color="0.4", linewidth=1, linestyle="--", label="budget")
                ax.set_ylim(0)
            if len(ax.lines) > 1:
                ax.legend()
        for ax in axes[len(panels) :]:
            ax.remove()
    return figure


def _draw_panel(ax: Any, panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    for (metric, legend), colour in zip(panel.series.items(), COLOURS, strict=False):
        steps, values = _points(rows, metric)
        if not steps:
            continue
        marker = "o" if len(steps) < 30 else None
        ax.plot(steps, values, color=colour, label=legend, marker=marker, markersize=3, clip_on=False)
    ax.set_title(panel.title)
    ax.set_xlabel("step")
    ax.set_xlim(0, rows[-1]["step"])
    if panel.percent:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ax.set_ylim(top=1)
    if panel.log:
        ax.set_yscale("log")


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    return [step for step, _ in points], [value for _, value in points]


def styled() -> Any:
    """Return a context with the style of figures."""
    require("matplotlib", "plots", "A plot")
    import matplotlib

    return matplotlib.rc_context(STYLE)
