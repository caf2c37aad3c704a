"""An option of the command line for every field of a dataclass of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from dpshard.applications.cli.settings import RECIPES, TrainSettings


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**flags` of a command by one option per setting of a run; None means not given."""
    return options_of(TrainSettings, RECIPES)(command)


def options_of(
    settings: type, recipes: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the `**flags` of a command by one option per field; None means not given.

    A field's metadata has `help` and `panel`. `recipes` are other defaults by task, for the help texts.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(settings)
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hints[f.name] | None, _option(f, hints[f.name], recipes or {})],
            )
            for f in fields(settings)
        ]
        command.__signature__ = signature.replace(parameters=own + options)
        return command

    return decorated


def _option(setting: Field[Any], hint: Any, recipes: Mapping[str, Mapping[str, Any]]) -> Any:
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    default = "none" if setting.default is None else "off" if setting.default is False else setting.default
    own = {task: r[setting.name] for task, r in recipes.items() if setting.name in r}
    notes = [f"default: {default}"]
    notes += [f"{task}: {'fits the data' if value is None else value}" for task, value in own.items()]
    listed = f"One of {', '.join(choices)}. " if choices else ""
    return typer.Option(
        "--" + setting.name.replace("_", "-"),  # without --no-...: flags are off by default
        help=f"{escape(setting.metadata['help'])} {listed}[dim]\\[{'; '.join(notes)}][/]",
        metavar="NAME" if choices else setting.metadata.get("metavar"),
        rich_help_panel=setting.metadata["panel"],
    )
