"""`dpshard plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpshard.applications.cli import console, plots
from dpshard.applications.cli.run_folder import RunFolder


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train`, finished or not.")],
) -> None:
    """Draw a run's metrics (loss, accuracy, epsilon, clip fraction, gradient-SNR) into RUN/plots, as PNG."""
    for path in plots.draw(RunFolder.open(run)):
        console.out.print(str(path))
