from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpshard.applications.cli import app


@pytest.fixture
def run() -> Callable[..., Any]:
    """A command of the command line, within this process."""
    from typer.testing import CliRunner

    def command(*arguments: object, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    return command
