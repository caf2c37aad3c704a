"""Kinds of inputs and attributes; the model is verified again for a new kind."""

from __future__ import annotations

import functools
import math
from enum import Enum
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpshard.interception.held_objects import is_foreign, slots_of
from dpshard.interception.run import Run

_EXACT = 4
_DEEPEST = 4
_MOST = 64
_BY_VALUE = (
    Tensor, nn.Module, ModuleType, type, Enum, np.generic, np.ndarray, str, bytes, range, complex, set, frozenset, int,
    float,
)  # fmt: skip


def kind_of_value(x: Any) -> Any:
    """Return the kind of a value: larger numbers count by sign and power of two."""
    if isinstance(x, Enum):
        return (type(x), x.name)
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, (bool, str)) or x is None:
        return x
    if isinstance(x, int):
        return x if abs(x) <= _EXACT else ("int", x > 0, x.bit_length())
    if isinstance(x, float):
        return ("float", x > 0, math.frexp(x)[1] if x and math.isfinite(x) else repr(x))
    if isinstance(x, complex):
        return (kind_of_value(x.real), kind_of_value(x.imag))
    if isinstance(x, (type, ModuleType)):
        return (getattr(x, "__module__", None), getattr(x, "__qualname__", x.__name__))
    return _kind_of_collection(x)


def _kind_of_collection(x: Any) -> Any:
    if isinstance(x, nn.Module):
        return ("module", id(x))
    if isinstance(x, range):
        return tuple(map(kind_of_value, (x.start, x.stop, x.step)))
    if isinstance(x, bytes):
        return x if len(x) <= _MOST else ("bytes", len(x).bit_length())
    if isinstance(x, np.ndarray) and x.dtype != object and x.size <= _EXACT:
        return (x.shape, *map(kind_of_value, x.ravel().tolist()))
    if isinstance(x, (set, frozenset)) and len(x) <= _MOST:
        return frozenset(map(kind_of_value, x))
    return None


def kind_of_object(x: Any, depth: int = 0) -> Any:
    """Return the kinds of an object's contents."""
    if type(x) is Tensor and x.numel() == 1 and x.device.type == "cpu":
        return kind_of_value(x.item())
    if isinstance(x, _BY_VALUE) or depth == _DEEPEST:
        return kind_of_value(x)
    if isinstance(x, MethodType):
        return kind_of_object(x.__func__, depth + 1), kind_of_object(x.__self__, depth + 1)
    if is_foreign(getattr(x, "__module__", None) if isinstance(x, FunctionType) else type(x).__module__):
        return getattr(x, "__qualname__", None)
    held = contents_of(x)
    if held is None:
        return kind_of_value(x) if not callable(x) else getattr(x, "__qualname__", None)
    kinds = [(str(name), kind_of_object(item, depth + 1)) for name, item in [*held.items()][:_MOST]]
    return (x.__code__ if isinstance(x, FunctionType) else type(x), tuple(kinds))


def contents_of(x: Any) -> dict[Any, Any] | None:
    """Return what an object, a collection or a function holds, by name; None if nothing."""
    if isinstance(x, dict):
        return x
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    if isinstance(x, functools.partial):
        return {"function": x.func, "args": x.args, **x.keywords}
    if isinstance(x, FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if cell != CellType()} | (x.__kwdefaults__ or {})
    slots = [name for name in slots_of(x) if hasattr(x, name)]
    if not slots:
        return vars(x) if hasattr(x, "__dict__") else None
    return {name: getattr(x, name) for name in slots} | getattr(x, "__dict__", {})


def kind_of_run(run: Run) -> Any:
    """Return the kind of a module call: structure, ranks, dtypes, and all non-tensors."""
    inputs = [
        (x.dim(), x.dtype, d) if isinstance(x, Tensor) else kind_of_value(x)
        for x, d in zip(run.leaves, run.dims, strict=True)
    ]
    # A batch of one sample cannot show mixing.
    several = run.rows > 1, run.packed is not None and run.packed.side_by_side
    return (run.module, run.tree, tuple(inputs), *several, run.batch_size == 1 < run.rows_per_unit)


def sizes_of_run(run: Run) -> Any:
    """Return the sizes of the inputs besides the samples, and which are contiguous."""
    return tuple(
        [
            (x.is_contiguous(), *[n for place, n in enumerate(x.shape) if place != d])
            for x, d in zip(run.leaves, run.dims, strict=True)
            if isinstance(x, Tensor)
        ]
    )


def kind_of_contents(run: Run) -> Any:
    """Return the kinds of objects among the inputs, which forward may change."""
    with torch._C.DisableTorchFunction():
        return tuple(None if d is not None else kind_of_object(x) for x, d in zip(run.leaves, run.dims, strict=True))
