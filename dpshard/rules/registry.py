"""The registry: torch function -> rule, or -> what it is composed of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]

RULES: dict[Callable[..., Any], Rule] = {}

ROUTED_RULES: dict[Callable[..., Any], Rule] = {}
"""Rules for calls on routed rows, of which `Call.samples` says whose they are; others never see such rows."""

COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Functions that are looked into rather than ruled as a whole: the same, written in functions of torch."""


def rule(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for torch functions; the rule is called with the Call and the function's own arguments."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = run
        return run

    return register


def routed_rule(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for torch functions on routed rows."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            ROUTED_RULES[function] = run
        return run

    return register


def composite(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what takes the place of a torch function in a private forward, with the same arguments and result."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSITES[function] = run
        return run

    return register
