"""Options of the command line, with their texts in options.yaml."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from dpshard.applications.cli.formats import HELP
from dpshard.applications.cli.settings import RECIPES, TrainSettings

Command = Callable[..., None]


def with_options(command: Command) -> Command:
    """Replace the `**flags` of a command by the settings of a run; None means not given."""
    return options_of(TrainSettings, "train", RECIPES)(command)


def options_of(
    settings: type, section: str, recipes: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Command], Command]:
    """Replace the `**flags` of a command by one option per field of a section of options.yaml."""

    def decorated(command: Command) -> Command:
        hints, own = get_type_hints(settings), {setting.name: setting for setting in fields(settings)}
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for panel, texts in HELP[section].items():
            for name, text in texts.items():
                choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
                option = typer.Option(
                    "--" + name.replace("_", "-"),  # without --no-...: flags are off by default
                    help=f"{escape(text)} {_notes(name, own[name].default, choices, recipes or {})}",
                    metavar="NAME" if choices else own[name].metadata.get("metavar"),
                    rich_help_panel=panel,
                )
                hint, kind = Annotated[hints[name] | None, option], inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(name, kind, default=None, annotation=hint))
        command.__signature__ = signature.replace(parameters=parameters)
        return command

    return decorated


def _notes(name: str, default: Any, choices: tuple[str, ...], recipes: Mapping[str, Mapping[str, Any]]) -> str:
    default = "none" if default is None else "off" if default is False else default
    own = {task: recipe[name] for task, recipe in recipes.items() if name in recipe}
    notes = [f"{task}: {'fits the data' if value is None else value}" for task, value in own.items()]
    listed = f"One of {', '.join(choices)}. " if choices else ""
    return f"{listed}[dim]\\[{'; '.join([f'default: {default}', *notes])}][/]"


def described(section: str, **details: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Return a decorator that gives parameters their texts in a `section` of options.yaml.

    `details` are other arguments of typer.Option by parameter; "names" are those of the option. Flags have no --no-....
    """
    texts = {name: text for panel in HELP[section].values() for name, text in panel.items()}

    def option(parameter: inspect.Parameter) -> inspect.Parameter:
        if (name := parameter.name) not in texts:
            return parameter
        names = ("--" + name.replace("_", "-"),) if parameter.annotation is bool else ()
        more: dict[str, Any] = {"names": names, **details.get(name, {})}
        own = typer.Option(*more.pop("names"), help=texts[name], **more)
        return parameter.replace(annotation=Annotated[parameter.annotation, own])

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        command.__signature__ = signature.replace(parameters=[option(p) for p in signature.parameters.values()])
        return command

    return decorated
