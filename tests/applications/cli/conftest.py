import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpshard.applications.cli import app

QUICK = "--steps 6 --batch-size 64 --noise-multiplier 1 --evaluations 2 --checkpoint-every 2".split()
"""A run on digits that takes about a second."""

SECRET = bytes(range(32))
DRIVER = (
    f"import dpshard.engine; dpshard.engine.new_run_secret = lambda: {SECRET!r}; "
    "from dpshard.applications.cli import app; app()"
)
"""The command line, but with a run secret that we know, so that two runs can be compared."""


@pytest.fixture
def dpshard() -> Callable[..., Any]:
    """Run a command in this process; the result has exit_code, stdout, stderr."""

    def run(*arguments: object, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    return run


@pytest.fixture
def known_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: SECRET)


@pytest.fixture
def spawn(tmp_path: Path):
    """Start a command in a process of its own, under the known secret; killed at the end of the test."""
    processes = []

    def start(*arguments: object, driver: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", driver + DRIVER, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a process group, as a terminal's Ctrl-C meets it
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
