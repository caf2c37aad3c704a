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
    """Draw loss, accuracy, epsilon, clip fraction and gradient-SNR of a run as PNG in RUN/plots."""
    for path in plots.draw(RunFolder.open(run)):
        console.out.print(str(path))
