"""Libraries that only a contender needs."""

from __future__ import annotations

import importlib

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
