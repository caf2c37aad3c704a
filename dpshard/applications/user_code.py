"""User functions, named package.module:function."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from dpshard.errors import ConfigurationError


def is_path(text: str) -> bool:
    """Return True for package.module:function."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", text) is not None


def load(path: str) -> Callable[..., Any]:
    """Return the function at `path`, package.module:function, also in the working directory.

    Raises ConfigurationError without one.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigurationError(f"{path!r} names no function: write package.module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"{path}: {module_name} cannot be imported: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{path}: {module_name} ({module.__file__}) has no function {name}.")
    return function
