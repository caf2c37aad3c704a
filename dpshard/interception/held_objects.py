"""The contents of objects, including slots, closure cells, partials and bound methods."""

from __future__ import annotations

import array
import functools
import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

FOREIGN = frozenset(
    "torch dpshard lightning pytorch_lightning accelerate deepspeed tokenizers datasets pandas logging weakref "
    "threading multiprocessing concurrent asyncio".split()
)
"""Packages whose objects are not searched."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_OPAQUE = (type, ModuleType, nn.Module)
_LARGE = 1_000


def _write_file(file: Any, state: tuple[int, Any] | None) -> None:
    if state is not None:
        file.seek(0)
        file.truncate()
        file.write(state[1])
        file.seek(state[0])


STATEFUL: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.SystemRandom: (lambda _: None, lambda *_: None),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
    **dict.fromkeys((bytearray, array.array), (lambda x: x[:], lambda x, content: x.__setitem__(slice(None), content))),
    **dict.fromkeys((io.BytesIO, io.StringIO), (lambda f: None if f.closed else (f.tell(), f.getvalue()), _write_file)),
}
"""Functions that read and set the state of these types."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


class Container:
    """A collection, or an object's attributes."""

    def __init__(self, owner: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.owner, self.read, self.write = owner, read, write


def refill(x: Any, content: Any) -> None:
    """Restore the content of a collection."""
    x.clear()
    x.update(content) if isinstance(x, dict | set) else x.extend(content)


def is_foreign(name: str | None) -> bool:
    """Return True for a module of FOREIGN packages, except torch.distributions, which hold the user's values."""
    return (name or "").partition(".")[0] in FOREIGN and not (name or "").startswith("torch.distributions")


def container(x: Any) -> Container | None:
    """Return the content of `x`; None if it cannot be read."""
    if isinstance(x, Container):
        return x
    if isinstance(x, dict):
        return Container(x, lambda: dict(x), lambda content: refill(x, content))
    if isinstance(x, list | deque):
        return Container(x, lambda: list(x), lambda content: refill(x, content))
    if isinstance(x, tuple):
        return Container(x, lambda: x, lambda _: None)
    if isinstance(x, _OPAQUE) or is_foreign(type(x).__module__):
        return None
    if isinstance(x, FunctionType):
        return None if is_foreign(x.__module__) else _function(x)
    if isinstance(x, MethodType | BuiltinMethodType):
        return Container(x, lambda: {"self": x.__self__, "function": getattr(x, "__func__", None)}, lambda _: None)
    if isinstance(x, functools.partial):
        return Container(x, lambda: {"": x.func, "args": x.args, "keywords": x.keywords}, lambda _: None)
    slots = list(slots_of(x))
    return _object(x, slots) if slots or hasattr(x, "__dict__") else None


def slots_of(x: Any) -> Iterator[str]:
    """Yield the names of an object's slots."""
    for kind in type(x).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{kind.__name__.lstrip('_')}{name}" if private else name


def _object(x: Any, slots: list[str]) -> Container:
    content = vars(x) if hasattr(x, "__dict__") else {}

    def read() -> dict[str, Any]:
        return content | {name: getattr(x, name) for name in slots if hasattr(x, name)}

    def write(before: dict[str, Any]) -> None:
        refill(content, {name: value for name, value in before.items() if name not in slots})
        for name in slots:
            if name in before and getattr(x, name, before) is not before[name]:
                object.__setattr__(x, name, before[name])  # works for frozen dataclasses
            elif name not in before and hasattr(x, name):
                object.__delattr__(x, name)

    return Container(x, read, write)


def _function(x: FunctionType) -> Container:
    cells = dict(zip(x.__code__.co_freevars, x.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        found = dict(vars(x))
        for name, cell in cells.items():
            try:
                found[f"cell {name}"] = cell.cell_contents
            except ValueError:
                continue
        return found

    def write(before: dict[str, Any]) -> None:
        now = read()
        for name, cell in cells.items():
            if (key := f"cell {name}") in before and now.get(key, before) is not before[key]:
                cell.cell_contents = before[key]
        attributes = {name: value for name, value in before.items() if not name.startswith("cell ")}
        if vars(x) or attributes:
            refill(vars(x), attributes)

    return Container(x, read, write)


def is_data(x: Any) -> bool:
    """Return True for a large collection of plain values or tuples."""
    if type(x) not in (list, tuple, dict, deque) or len(x) < _LARGE:
        return False
    items = x.values() if isinstance(x, dict) else x
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds = kinds - {tuple} | set(map(type, chain.from_iterable(v for v in items if type(v) is tuple)))
    return all(issubclass(kind, PLAIN) for kind in kinds)


def access_to(x: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return the functions of STATEFUL for `x`."""
    return _access_to_kind(type(x))


@functools.lru_cache(maxsize=10_000)
def _access_to_kind(of: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    return next((access for kind, access in STATEFUL.items() if issubclass(of, kind)), None)
