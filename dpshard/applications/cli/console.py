"""Terminal output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from dpshard.errors import DpshardError

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)

# Typer vendors click in some versions only.
UsageError: Any = typer.BadParameter.__base__

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")]
"""The option --json of commands that print a table."""

USER_ERROR = 2
"""Exit code after a user's error; bugs have 1."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


class OneLineErrors(TyperGroup):
    """Prints each error and warning on one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments for ranks that a command starts."""
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a refusal is one line, and exit code 2."""
        # absl logs a warning for each Renyi order that dp-accounting skips.
        logging.getLogger("absl").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            shown: set[str] = set()

            def show(message: Warning | str, *_where: object) -> None:
                text = one_line(message)
                if text not in shown:
                    shown.add(text)
                    err.print(f"[yellow]warning:[/] {escape(text)}")

            warnings.showwarning = show
            try:
                return super().invoke(ctx)
            except DpshardError as error:
                print_error(error)
                raise typer.Exit(USER_ERROR) from error
            except UsageError as error:
                help = f"See {error.ctx.command_path if error.ctx else 'dpshard'} --help."
                print_error(f"{error.format_message().replace('Value error, ', '').rstrip('.?')}. {help}")
                raise typer.Exit(USER_ERROR) from error


def plain_table(title: str | None = None, columns: Sequence[str] = (), *, no_wrap: bool = False, **more: Any) -> Table:
    """Return an empty table without edges; columns with a name are for numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False, **more)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=no_wrap)
    return table


def print_error(message: object) -> None:
    """Print an error on one line."""
    err.print(f"[bold red]error:[/] {escape(one_line(message))}")


class Advance(Protocol):
    """Function that advances a progress bar by one step."""

    def __call__(self, description: str | None = None, *, total: int | None = None) -> None:
        """Advance the bar."""


@contextmanager
def progress(description: str, total: int | None, *, speaking: bool = True) -> Iterator[Advance]:
    """Yield a function that advances a bar, which shows only on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("ETA"))
    hidden = not (speaking and err.is_terminal)
    bar = Progress(*columns, TimeRemainingColumn(), console=err, disable=hidden, transient=True)
    task = bar.add_task(escape(description), total=total)

    def advance(description: str | None = None, *, total: int | None = None) -> None:
        described = None if description is None else escape(description)
        bar.update(task, advance=1, description=described, total=total)

    with bar:
        yield advance


def one_line(message: object) -> str:
    """Return `message` on one line."""
    return " ".join(str(message).split())
