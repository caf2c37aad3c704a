"""The registry: torch function -> rule or composition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpshard.rules.torch_functions import Function

Rule = Callable[..., Any]

RULES: dict[Function, Rule] = {}

ROUTED_RULES: dict[Function, Rule] = {}
"""Rules for functions in which the position of routed rows matters."""

COMPOSITES: dict[Function, Function] = {}
"""Functions that are replaced by equal compositions of other torch functions."""


def rule(*functions: Function) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule. A rule gets the Call and the function's arguments."""
    return _put_into(RULES, *functions)


def routed_rule(*functions: Function) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for routed rows."""
    return _put_into(ROUTED_RULES, *functions)


def composite(function: Function) -> Callable[[Function], Function]:
    """Return a decorator that registers a replacement with equal arguments and result."""
    return _put_into(COMPOSITES, function)


def _put_into(table: dict[Function, Function], *functions: Function) -> Callable[[Function], Function]:
    def register(run: Function) -> Function:
        table.update(dict.fromkeys(functions, run))
        return run

    return register
