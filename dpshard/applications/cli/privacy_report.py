"""`dpshard report`: the privacy report of a finished run, in one self-contained HTML file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.applications.cli import console, plots
from dpshard.applications.cli.audit import Attack, attacks
from dpshard.applications.cli.formats import NEIGHBOURS
from dpshard.applications.cli.run_folder import RunFolder, intact, write_atomically
from dpshard.errors import RunFolderError

_CAPTIONS = {
    "loss": "Mean loss of the samples of a step, and of held-out ones.",
    "accuracy": "Share of held-out answers that the model gets right: labels, or masked bytes.",
    "perplexity": "Perplexity of held-out text.",
    "clip_fraction": "Share of samples with a gradient longer than the clipping norm.",
    "gradient_snr": "Norm of the clipped sum over the expected norm of the noise: below 1, most of an update is noise.",
}
"""Captions of pictures that epsilon does not cover."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train` that has finished.")],
    public: Annotated[
        bool, typer.Option("--public", help="Leave out scores, losses, norms and audits: epsilon does not cover them.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. [dim]\\[default: RUN/report.html][/]")
    ] = None,
) -> None:
    """Write the privacy report of a run: its guarantee, its mechanism, its cost, and its limits.

    The report is one HTML file without external links, for a browser or a printer. It includes the
    bounds of `dpshard audit RUN`, if you ran that before.
    """
    folder = RunFolder.open(run)
    target = out or folder.path / ("report-public.html" if public else "report.html")
    write_atomically(target, render(folder, public=public).encode(), public=public)
    console.out.print(str(target))


def render(folder: RunFolder, *, public: bool = False) -> str:
    """Return the page; raise RunFolderError if the run has not finished."""
    from dpshard.accounting import rounded_up
    from dpshard.applications.cli.final_report import mechanism_rows, result_rows

    written, resume = folder.report.with_suffix(".json"), f"dpshard train --resume {folder.path}"
    if not written.exists():
        raise RunFolderError(f"{folder.path} has not finished: run {resume} first.")
    settings = folder.settings()  # raises for a damaged config.yaml
    quoted = folder.config.read_text("utf-8")
    if public and settings.data is not None:  # file names may identify people
        quoted = quoted.replace(settings.data, "(your data)")
    rows = folder.read_metrics()
    with intact(folder.metrics, "restore it from a copy"):
        pictures = plots.svgs([{"step": 0, "epsilon": 0.0}, *rows], settings.target_epsilon)
        points = [(f"{row['step']:,}", rounded_up(row["epsilon"])) for row in rows if row.get("epsilon") is not None]
    with intact(written, f"remove it and {folder.report.name}, and {resume} writes them again"):
        report = _read(written)
        return _filled(
            report=report,
            mechanism=mechanism_rows(report["privacy"]),
            results=[] if public else result_rows(report),
            public=public,
            folder=folder.path.resolve().name,
            settings=quoted,
            budget=settings.target_epsilon,
            spent=[points[i * (len(points) - 1) // 4] for i in range(5)] if len(points) > 5 else points,
            pictures=pictures,
            captions=_CAPTIONS,
            attacks=None if public else _attacks(folder),
            neighbours=NEIGHBOURS,
            rounded_up=rounded_up,
            exp=math.exp,
        )


def _filled(**context: Any) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.get_template("report.html.jinja").render(context)
    except jinja2.UndefinedError as error:
        raise ValueError(str(error)) from error


def _attacks(folder: RunFolder) -> list[Attack] | None:
    if not folder.audit.exists():
        return None
    with intact(folder.audit, f"dpshard audit {folder.path} writes it again"):
        found = attacks(_read(folder.audit))
        if not found:
            raise ValueError("it holds no attack")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}. Check your permissions.") from error
