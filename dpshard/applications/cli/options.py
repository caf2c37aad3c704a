"""Options of the command line for settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
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
                hint = Annotated[hints[name] | None, _option(own[name], hints[name], panel, text, recipes or {})]
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(name, kind, default=None, annotation=hint))
        command.__signature__ = signature.replace(parameters=parameters)
        return command

    return decorated


def described(section: str, **details: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Return a decorator that gives parameters their texts in a `section` of options.yaml.

    `details` are other arguments of typer.Option by parameter; "names" are those of the option.
    """
    texts = {name: text for panel in HELP[section].values() for name, text in panel.items()}

    def option(name: str) -> Any:
        more = dict(details.get(name, {}))
        return typer.Option(*more.pop("names", ()), help=texts[name], **more)

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        command.__signature__ = signature.replace(
            parameters=[
                p.replace(annotation=Annotated[p.annotation, option(p.name)]) if p.name in texts else p
                for p in signature.parameters.values()
            ]
        )
        return command

    return decorated


def _option(setting: Field[Any], hint: Any, panel: str, text: str, recipes: Mapping[str, Mapping[str, Any]]) -> Any:
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    default = "none" if setting.default is None else "off" if setting.default is False else setting.default
    own = {task: r[setting.name] for task, r in recipes.items() if setting.name in r}
    notes = [f"default: {default}"]
    notes += [f"{task}: {'fits the data' if value is None else value}" for task, value in own.items()]
    listed = f"One of {', '.join(choices)}. " if choices else ""
    return typer.Option(
        "--" + setting.name.replace("_", "-"),  # without --no-...: flags are off by default
        help=f"{escape(text)} {listed}[dim]\\[{'; '.join(notes)}][/]",
        metavar="NAME" if choices else setting.metadata.get("metavar"),
        rich_help_panel=panel,
    )
