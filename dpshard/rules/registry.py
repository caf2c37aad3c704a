"""The registry: torch function -> rule, or -> what it is composed of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpshard.rules.torch_functions import Function

Rule = Callable[..., Any]

RULES: dict[Function, Rule] = {}

ROUTED_RULES: dict[Function, Rule] = {}
"""Rules for calls on routed rows that look at where rows lie; see [Note: Rules for routed rows]."""

COMPOSITES: dict[Function, Function] = {}
"""Functions that are looked into rather than ruled as a whole: the same, written in functions of torch."""


def rule(*functions: Function) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions; the rule is called with the Call and the function's own arguments."""
    return _put_into(RULES, *functions)


def routed_rule(*functions: Function) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions on routed rows."""
    return _put_into(ROUTED_RULES, *functions)


def composite(function: Function) -> Callable[[Function], Function]:
    """Register what takes the place of a torch function in a private forward, with the same arguments and result."""
    return _put_into(COMPOSITES, function)


def _put_into(table: dict[Function, Function], *functions: Function) -> Callable[[Function], Function]:
    def register(run: Function) -> Function:
        table.update(dict.fromkeys(functions, run))
        return run

    return register
