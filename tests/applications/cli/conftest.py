import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpshard.applications.cli import app
from tests.coarse import coarse
from tests.forks import Command, Forked

QUICK = "--steps 6 --batch-size 64 --noise-multiplier 1 --evaluations 2 --checkpoint-every 2".split()
"""A run on digits that takes about a second."""

SECRET = bytes(range(32))
NO_PICTURES = (
    "from dpshard.applications.cli import plots; "
    "plots.draw = lambda folder: [(folder.plots / 'overview.png').write_bytes(b'')] and []; "
)
"""Leaves an empty picture where the plots would be."""
DRIVER = (
    f"import dpshard.engine; dpshard.engine.new_run_secret = lambda: {SECRET!r}; "
    "import subprocess, types, tests.forks; from dpshard.applications.cli import app, launch; "
    "launch.subprocess = types.SimpleNamespace(Popen=tests.forks.Branched, DEVNULL=subprocess.DEVNULL); app()"
)
"""The command line, but with a run secret that we know, so that two runs can be compared, and forked ranks."""


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


@contextmanager
def no_pictures() -> Iterator[None]:
    """To draw them takes ten times as long as a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpshard.applications.cli.plots.draw", lambda folder: [])
        yield


@pytest.fixture
def pictures() -> None:
    """A test that asks for this has pictures of its runs."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "pictures" in request.fixturenames else no_pictures():
        yield


@pytest.fixture(scope="module")
def coarse_losses() -> Iterator[None]:
    """For tests of commands; those of figures are in tests/accounting and test_account.py."""
    with coarse():
        yield


@pytest.fixture
def known_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: SECRET)


class Spawned(Forked):
    """With what subprocess.Popen has for the output."""

    def __init__(self, command: Command) -> None:
        read, write = os.pipe()
        super().__init__(
            command,
            stdout=write,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group, as a terminal's Ctrl-C meets it
        )
        os.close(write)
        self.stdout = os.fdopen(read)

    def communicate(self, timeout: float = 90) -> tuple[str, None]:
        """Return what it prints until all that hold its output have ended."""
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        printed = self.stdout.read()
        self.wait()
        killer.cancel()
        return printed, None


@pytest.fixture
def spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Spawned]]:
    """Start a command in a process of its own, under the known secret; killed at the end of the test."""
    processes = []

    def start(*arguments: object, driver: str = NO_PICTURES) -> Spawned:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            processes.append(Spawned([sys.executable, "-c", driver + DRIVER, *map(str, arguments)]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
