"""What goes to the terminal besides progress: one line an error, one line a warning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from dpshard.errors import DpshardError

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)

# Typer brings a copy of click of its own, or takes the installed one, depending on its version.
UsageError: Any = typer.BadParameter.__base__

USER_ERROR = 2
"""Exit code of a refusal, as for a wrong option; 1 is left to bugs."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, by the shell's convention 128 + SIGINT."""


class OneLineErrors(TyperGroup):
    """A command group that answers errors with one line, and shows warnings as one line each."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its refusals become a line on stderr and exit code 2, anything else stays a bug."""
        # dp-accounting logs a warning for every Renyi order that it leaves out, which is part of its method.
        logging.getLogger("absl").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.showwarning = _warning_printer()
            try:
                return super().invoke(ctx)
            except DpshardError as error:
                print_error(error)
                raise typer.Exit(USER_ERROR) from error
            except UsageError as error:
                help = f"See {error.ctx.command_path if error.ctx else 'dpshard'} --help."
                print_error(f"{error.format_message().replace('Value error, ', '').rstrip('.')}. {help}")
                raise typer.Exit(USER_ERROR) from error


def print_error(message: object) -> None:
    """An error, on a line of its own."""
    err.print(f"[bold red]error:[/] {escape(one_line(message))}")


class Advance(Protocol):
    """Moves a progress bar on by one step."""

    def __call__(self, description: str | None = None, *, total: int | None = None) -> None:
        """`description` and `total` take the place of what was shown before."""


@contextmanager
def progress(description: str, total: int | None, *, speaking: bool = True) -> Iterator[Advance]:
    """A bar over `total` steps (None: not known yet), with the time that remains; yields what moves it.

    On a terminal alone, and only if `speaking`: of several ranks one shows it.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=err,
        disable=not (speaking and err.is_terminal),
        transient=True,
    )
    task = bar.add_task(escape(description), total=total)

    def advance(description: str | None = None, *, total: int | None = None) -> None:
        described = None if description is None else escape(description)
        bar.update(task, advance=1, description=described, total=total)

    with bar:
        yield advance


@contextmanager
def warnings_only_if(speaking: bool) -> Iterator[None]:
    """A block in which warnings of all ranks but one are silent: they would say the same."""
    if speaking:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_line(message: object) -> str:
    """The text of `message` on a single line."""
    return " ".join(str(message).split())


def _warning_printer() -> Callable[..., None]:
    shown: set[str] = set()

    def show(message: Warning | str, *_where: object) -> None:
        text = one_line(message)
        if text not in shown:
            shown.add(text)
            err.print(f"[yellow]warning:[/] {escape(text)}")

    return show
