"""The command line as such."""

import inspect
import subprocess
import sys

import pytest

from dpshard import __version__
from dpshard.applications.cli import app
from dpshard.applications.cli.formats import to_json


@pytest.mark.parametrize("command", [[], ["train"], ["advise"], ["account"], ["plan"], ["bench"], ["plot"], ["doctor"]])
def test_help_is_there_for_every_command(dpshard, command):
    assert "Usage" in dpshard(*command, "--help").stdout


def test_the_version_and_no_command_at_all(dpshard):
    assert dpshard("--version").stdout == f"dpshard {__version__}\n"
    assert "Commands" in dpshard().stdout


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["train", "--optimizer", "foo"], "'adamw'"),
        (["train", "--steps", "many"], "'--steps'"),
        (["train", "--lr", "1"], "--lr"),
        (["account"], "--sample-size"),
        (["learn"], "learn"),
    ],
)
def test_a_wrong_call_gets_one_line_too(dpshard, wrong, word):
    error = dpshard(*wrong, exit_code=2).stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert word in error
    assert "Value error" not in error
    assert "--help" in error


def test_help_names_every_option_of_train(dpshard):
    output = dpshard("train", "--help").stdout
    for option in ("--target-epsilon", "--noise-multiplier", "--resume", "--config", "--out", "--clipping-style"):
        assert option in output


@pytest.mark.parametrize("command", [info.callback for info in app.registered_commands], ids=lambda c: c.__module__)
def test_help_wraps_once_on_a_screen_of_80(command):
    """Typer keeps the line breaks of later paragraphs."""
    paragraphs = [paragraph.splitlines() for paragraph in inspect.getdoc(command).split("\n\n")[1:]]
    assert all(len(line) <= 78 for lines in paragraphs if len(lines) > 1 for line in lines)


def test_help_keeps_brackets(dpshard):
    assert "[female, male]" in " ".join(dpshard("train", "--help").stdout.replace("│", " ").split())


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from dpshard.applications.cli import app; "
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_json_is_strict():
    assert to_json({"a": [float("nan"), 1.0], "b": float("inf")}) == '{"a": [null, 1.0], "b": null}'
