"""What a torch function was called with, and what it is called: shared by all that look at calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


def tensors_of(args: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of a torch function, in order, also within lists and dicts."""
    for x in args.values() if isinstance(args, dict) else args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list, dict)):
            yield from tensors_of(x)


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors that a torch function returned."""
    return list(tensors_of((result,)))


def function_name(func: Function) -> str:
    """The name of a torch function, or of the property of a tensor that it gets."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]
