"""Libraries that only a contender needs, and the message for one that cannot run."""

from __future__ import annotations

import importlib

from dpshard.applications.cli.console import one_line
from dpshard.errors import ConfigurationError


class MissingExtraError(ConfigurationError):
    """A contender's library is not installed."""


def needed(library: str, *, extra: str) -> None:
    """Raise MissingExtraError, which says how to install it, if `library` cannot be imported."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise MissingExtraError(
            f"needs {library}, which cannot be imported ({error}): pip install -e '.[{extra}]', or leave it out."
        ) from error


def reason(error: Exception) -> str:
    """Return the reason why a contender is not timed, on one line."""
    return one_line(error if isinstance(error, MissingExtraError) else f"{type(error).__name__}: {error}")
