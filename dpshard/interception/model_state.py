"""The state of a model besides its parameters: buffers, attributes and contents of objects, each with a path.

Global variables are not part of it; verification finds their effect on outputs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpshard.errors import UnsupportedParameterError
from dpshard.interception.held_objects import (
    GENERATORS,
    PLAIN,
    STATEFUL,
    Container,
    access_to,
    container,
    is_data,
    is_foreign,
    refill,
)

_FRAMEWORK = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
"""Names of attributes that torch or the interception sets."""
HOOKS = tuple(name for name, x in vars(nn.Module()).items() if "hooks" in name and isinstance(x, dict))
"""Names of torch's dicts of hooks; some models register hooks in their first forward."""
_MOST = 100_000
"""An attribute with more objects holds data, not state."""


@functools.lru_cache(maxsize=10_000)
def is_own(name: str) -> bool:
    """Return True for an attribute of the model."""
    return name not in _FRAMEWORK and not name.startswith(("ds_", "_ds", "_fsdp", "applied_p", "__"))


def parts_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return dicts of sub-modules and buffers."""
    modules: Any = module._modules
    buffers: Any = module._buffers
    return (modules, buffers) if isinstance(modules, dict) else (dict(modules.items()), dict(buffers.items()))


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module."""
    return {name: x for name, x in vars(module).items() if is_own(name)}


_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.strided: ("detach",),
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def _parts(x: Tensor) -> list[Tensor]:
    return [getattr(x, name)() for name in _PARTS.get(x.layout, ())]


def same(x: Any, y: Any) -> bool:
    """Return True if two values are equal; NaN equals NaN."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device or x.layout != y.layout:
            return False
        if x.layout is not torch.strided:
            return all(same(*parts) for parts in zip(_parts(x), _parts(y), strict=True))
        return bool(torch.equal(x, y) or ((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and x.tobytes() == y.tobytes()
    return type(x) is type(y) and bool(x == y or (x != x and y != y))


class ModelState:
    """The state of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: dict[str, tuple[Any, Any]] = {}  # path -> object, copy of its content
        with torch._C.DisableTorchFunction():  # modes must not intercept these reads
            for path, x in walk(model):
                self._saved[path] = (x, _copy(x))
        self._mutable = [(path, *saved) for path, saved in self._saved.items() if not isinstance(saved[0], PLAIN)]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]

    def restore(self) -> None:
        """Restore objects and contents."""
        with torch._C.DisableTorchFunction():
            for path, x, value in self._mutable:
                _put_back(x, value, path)
        for p, trained in self._trained:
            if p.requires_grad is not trained:
                p.requires_grad_(trained)

    def generators(self) -> list[str]:
        """Return the paths of generators of random numbers."""
        return [path for path, (x, _) in self._saved.items() if isinstance(x, GENERATORS)]

    def changes(self) -> dict[str, Any]:
        """Return the changed state by path; the value is None where the state no longer exists."""
        now, found = dict(walk(self._model)), {}
        for path, x in now.items():
            old, value = self._saved.get(path, (None, None))
            if isinstance(x, Container):
                continue
            if isinstance(x, set | frozenset):
                if old is None or x != value:
                    found[path] = sorted(repr(item) for item in x)
            elif path not in self._saved or type(x) is not type(old) or not _unchanged(x, old, value):
                found[path] = _copy(x)
        return found | dict.fromkeys(self._saved.keys() - now.keys())


def walk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield paths and values; containers precede their contents."""
    seen = {id(p) for p in model.parameters()}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        yield from _walk_module(path, module, seen)
        for kind in type(module).__mro__:
            own = not is_foreign(kind.__module__) and kind is not object
            if own and id(kind) not in seen:
                seen.add(id(kind))
                yield from _walk(f"{path}{kind.__name__}", _class_attributes(kind), seen, len(seen) + _MOST)


def walk_through(path: str, x: Any) -> dict[str, Any]:
    """Return paths and values within an object."""
    return dict(_walk(path, x, set(), _MOST))


def _walk_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(module))
    _, buffers = parts_of(module)
    yield f"{path}(buffers)", Container(buffers, lambda: dict(buffers), lambda x: refill(buffers, x))
    hooks = [vars(module)[name] for name in HOOKS]
    yield f"{path}(hooks)", Container(hooks, lambda: list(map(dict, hooks)), functools.partial(_put_back_hooks, hooks))
    names = module._non_persistent_buffers_set
    yield f"{path}(non-persistent)", names
    for name, buffer in list(buffers.items()):
        if buffer is not None:
            seen.add(id(buffer))
            yield f"{path}{name}", buffer

    def write(before: dict[str, Any]) -> None:
        for name in attributes(module).keys() - before.keys():
            del module.__dict__[name]
        module.__dict__.update(before)

    yield f"{path}(attributes)", Container(module, lambda: attributes(module), write)
    for name, x in attributes(module).items():
        yield from _walk(f"{path}{name}", x, seen, len(seen) + _MOST)


def _class_attributes(kind: type) -> Container:
    def read() -> dict[str, Any]:
        return {
            name: x
            for name, x in vars(kind).items()
            if not name.startswith("_abc") and not name.startswith("__") and _is_state(x)
        }

    def write(before: dict[str, Any]) -> None:
        for name, x in before.items():
            if vars(kind).get(name) is not x:
                setattr(kind, name, x)

    return Container(kind, read, write)


def _is_state(x: Any) -> bool:
    own = isinstance(x, FunctionType) and bool(vars(x))  # a method with attributes
    return own or isinstance(x, (*PLAIN, Tensor, np.ndarray, dict, list, set, deque, *STATEFUL))


def _put_back_hooks(hooks: list[dict[Any, Any]], before: list[dict[Any, Any]]) -> None:
    for now, then in zip(hooks, before, strict=True):
        if (now or then) and now.keys() != then.keys():
            refill(now, then)


def _walk(path: str, x: Any, seen: set[int], most: int) -> Iterator[tuple[str, Any]]:
    """Yield what `x` holds, until `most` objects have been seen."""
    if isinstance(x, nn.Parameter) and type(x) is not nn.Parameter:
        return
    if isinstance(x, PLAIN):
        yield path, x
        return
    if not isinstance(x, Container):  # a Container is temporary, so its id may repeat
        if id(x) in seen or len(seen) > most:
            return
        seen.add(id(x))
    if isinstance(x, nn.Module):  # for example in a list, which torch does not search
        for prefix, module in x.named_modules():
            if id(module) not in seen or module is x:
                yield from _walk_module(f"{path}.{prefix}." if prefix else f"{path}.", module, seen)
    elif isinstance(x, (Tensor, np.ndarray, set, frozenset, *STATEFUL)) or is_data(x):
        yield path, x
    elif (holder := container(x)) is not None:
        yield path, holder
        content = holder.read()
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for i, (key, item) in enumerate(items):
            yield from _walk(f"{path}[{key if isinstance(key, PLAIN) else f'#{i}'}]", item, seen, most)


def _copy(x: Any) -> Any:
    if isinstance(x, Container):
        return x.read()
    if isinstance(x, Tensor):
        return x if x.grad_fn is not None else (x.detach().clone(), x._version)
    if isinstance(x, np.ndarray | set | list | dict | deque):
        return x.copy()
    access = access_to(x)
    return x if access is None else access[0](x)


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Buffer, nn.Parameter) and not x.is_meta and x.layout in _PARTS


def _unchanged(x: Any, old: Any, value: Any) -> bool:
    if isinstance(x, Tensor):
        if x.grad_fn is not None or old.grad_fn is not None:
            return x is old
        return same(x.detach(), value[0]) if _is_plain(x) else x is old and x._version == value[1]
    if (access := access_to(x)) is not None:
        return x is old and _same_state(access[0](x), value)
    if isinstance(x, list | tuple | deque):
        return x is old and len(x) == len(value) and all(map(is_, x, value))
    if isinstance(x, dict):
        return x is old and list(x) == list(value) and all(map(is_, x.values(), value.values()))
    return same(x, value)


def _same_state(x: Any, y: Any) -> bool:
    return same(x, y) if isinstance(x, Tensor) else repr(x) == repr(y)


def _put_back(x: Any, value: Any, path: str) -> None:
    if isinstance(x, Container):
        x.write(value)
    elif isinstance(x, Tensor):
        if x.grad_fn is None and not _unchanged(x, x, value):
            now, before = _parts(x.detach()), _parts(value[0])
            if [part.shape for part in now] != [part.shape for part in before]:
                raise UnsupportedParameterError(
                    f"{path}: forward resizes this tensor in place, so it cannot be restored after a forward outside "
                    f"training. Assign a new tensor to the attribute instead."
                )
            with torch.no_grad():
                for part, content in zip(now, before, strict=True):
                    part.copy_(content)
    elif isinstance(x, np.ndarray):
        x[...] = value
    elif isinstance(x, set | list | dict | deque):
        if isinstance(x, set) or not _unchanged(x, x, value):
            refill(x, value)
    elif (access := access_to(x)) is not None:
        access[1](x, value)
