"""Names, arguments and outputs of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def tensors_of(args: Any) -> list[Tensor]:
    """Return the tensors among arguments, also within lists and dicts."""
    found: list[Tensor] = []
    for x in args.values() if isinstance(args, dict) else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list, dict)) and x:
            found += tensors_of(x)
    return found


def outputs_of(result: Any) -> list[Tensor]:
    """Return the tensors that a torch function returned."""
    return tensors_of((result,))


def differentiable(x: Tensor) -> bool:
    """Return True if a gradient may flow through `x`."""
    return x.is_floating_point() or x.is_complex()


def function_name(func: Function) -> str:
    """Return the name of a torch function or property."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]


def functions_named(names: Iterable[str], owners: Iterable[Any] = (torch, Tensor)) -> frozenset[Function]:
    """Return all functions of these names."""
    names = tuple(names)
    return frozenset(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))


def canonical(func: Function, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """Turn `w.type_as(x)` and `w.to(x)` into functions of w only."""
    if func is Tensor.unflatten:
        return torch.unflatten, args  # dynamo cannot trace the method in a mode
    if func in (Tensor.type_as, Tensor.to) and len(args) == 2 and isinstance(args[1], Tensor):
        return Tensor.to, (args[0], args[1].device, args[1].dtype)
    return func, args
