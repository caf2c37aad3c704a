"""The command line `dpshard`: a module per command, and helpers.

Commands import heavy modules when they run, so that `dpshard --help` does not wait for torch.
"""

from typing import Annotated

import typer

from dpshard import __version__
from dpshard.applications.cli import account, advise, audit, bench, doctor, plan, plots, privacy_report, train, tune
from dpshard.applications.cli.console import OneLineErrors

app = typer.Typer(
    name="dpshard",
    cls=OneLineErrors,
    help="Train PyTorch models with differential privacy, account for what it reveals, attack it, plan and measure it.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def about(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version or the help, if the user names no command."""
    if version:
        typer.echo(f"dpshard {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("train")(train.command)
app.command("tune")(tune.command)
app.command("advise")(advise.command)
app.command("account")(account.command)
app.command("audit")(audit.command)
app.command("plan")(plan.command)
app.command("bench")(bench.command)
app.command("plot")(plots.command)
app.command("doctor")(doctor.command)
app.command("report")(privacy_report.command)

__all__ = ["app"]
