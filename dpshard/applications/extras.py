"""Packages of extras."""

from __future__ import annotations

import importlib

from dpshard.errors import ConfigurationError


def require(package: str, extra: str, what: str) -> None:
    """Raise ConfigurationError unless `package`, which `what` needs, is installed."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigurationError(f"{what} needs {package}: pip install 'dpshard[{extra}]'.") from error
