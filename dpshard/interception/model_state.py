"""What a model holds beside its parameters: buffers, attributes, generators. It is saved, put back, and compared.

[Note: What a model may remember]
State lives in buffers, and in whatever hangs on a module or its class: numbers, tensors, arrays, lists, dicts, sets,
deques, generators, and objects with attributes of these. A walk finds it by its path. What hangs on a foreign
framework (a trainer, a process group) is its own, and what lives in globals and closures has no path: verification
sees that by its effect on outputs.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpshard.errors import UnsupportedParameterError

_FOREIGN = frozenset(
    "torch dpshard lightning pytorch_lightning accelerate deepspeed tokenizers datasets pandas logging weakref "
    "threading multiprocessing concurrent asyncio".split()
)
_FRAMEWORK = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
"""Attributes of a module that torch, or the interception, keeps."""
_HOOKS = tuple(name for name, x in vars(nn.Module()).items() if "hooks" in name and isinstance(x, dict))
"""Where a module keeps its hooks: some models put them there in their first forward, and note that they did."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, nn.Module)
_MOST = 100_000
"""Things looked at: beyond them an attribute holds data rather than state."""

GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
}
"""Kinds of generators: how their states are read and set."""


def is_own(name: str) -> bool:
    """Whether an attribute of a module is the model's own, rather than torch's or a sharding framework's."""
    return name not in _FRAMEWORK and not name.startswith(("ds_", "_ds", "_fsdp", "applied_p", "__"))


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds as plain attributes."""
    return {name: x for name, x in vars(module).items() if is_own(name)}


def same(x: Any, y: Any) -> bool:
    """Whether two values are equal; NaN is equal to NaN."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
            return False
        return bool(torch.equal(x, y) or ((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and x.tobytes() == y.tobytes()
    return type(x) is type(y) and bool(x == y or (x != x and y != y))


class ModelState:
    """The state of a model at one time, which can be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: dict[str, tuple[Any, Any]] = {}  # by path: the object, and a copy of what it holds
        with torch._C.DisableTorchFunction():  # modes compare what the model calls, not this
            for path, x in walk(model):
                self._saved[path] = (x, _copy(x))
        self._trained = [(p, p.requires_grad) for p in model.parameters()]

    def restore(self) -> None:
        """Put everything back: the same objects, with what they held."""
        with torch._C.DisableTorchFunction():
            for path, (x, value) in self._saved.items():
                _put_back(x, value, path)
        for p, trained in self._trained:
            if p.requires_grad is not trained:
                p.requires_grad_(trained)

    def changes(self) -> dict[str, Any]:
        """By path, copies of what is not now as it was saved; None for what is gone."""
        now, found = dict(walk(self._model)), {}
        for path, x in now.items():
            old, value = self._saved.get(path, (None, None))
            if isinstance(x, _Container):
                continue  # what it holds has paths of its own
            if isinstance(x, set | frozenset):
                if old is None or x != value:
                    found[path] = sorted(repr(item) for item in x)
            elif path not in self._saved or type(x) is not type(old) or not _unchanged(x, old, value):
                found[path] = _copy(x)
        return found | dict.fromkeys(self._saved.keys() - now.keys())


class _Container:
    """A dict, list or deque, or the attributes of an object or a class: what it holds is walked through by itself."""

    def __init__(self, owner: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.owner, self.read, self.write = owner, read, write


def walk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Paths and values of what a model holds beside parameters; containers come before what they hold."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        yield from _walk_module(path, module, seen)
        for kind in type(module).__mro__:
            own = kind.__module__.partition(".")[0] not in _FOREIGN and kind is not object
            if own and id(kind) not in seen:
                seen.add(id(kind))
                yield from _walk(f"{path}{kind.__name__}", _class_attributes(kind), seen)


def _walk_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(module))
    buffers = module._buffers
    yield f"{path}(buffers)", _Container(buffers, lambda: dict(buffers), lambda x: _refill(buffers, x))
    for name in _HOOKS:
        hooks = vars(module)[name]
        yield f"{path}({name})", _Container(hooks, hooks.copy, functools.partial(_put_back_hooks, hooks))
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

    yield f"{path}(attributes)", _Container(module, lambda: attributes(module), write)
    for name, x in attributes(module).items():
        yield from _walk(f"{path}{name}", x, seen)


def _class_attributes(kind: type) -> _Container:
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

    return _Container(kind, read, write)


def _is_state(x: Any) -> bool:
    return isinstance(x, (*_PLAIN, Tensor, np.ndarray, dict, list, set, deque, *GENERATORS))


def _refill(x: Any, content: Any) -> None:
    x.clear()
    x.update(content) if isinstance(x, dict | set) else x.extend(content)


def _put_back_hooks(hooks: dict[Any, Any], before: dict[Any, Any]) -> None:
    if hooks.keys() != before.keys():
        _refill(hooks, before)


def _container(x: Any) -> _Container | None:
    """What `x` holds, if it is something that can be looked into."""
    if isinstance(x, _Container):
        return x
    if isinstance(x, dict):
        return _Container(x, lambda: dict(x), lambda content: _refill(x, content))
    if isinstance(x, list | deque):
        return _Container(x, lambda: list(x), lambda content: _refill(x, content))
    if isinstance(x, tuple):
        return _Container(x, lambda: x, lambda _: None)
    if isinstance(x, _OPAQUE) or type(x).__module__.partition(".")[0] in _FOREIGN or not hasattr(x, "__dict__"):
        return None
    content = vars(x)
    return _Container(x, lambda: dict(content), lambda before: _refill(content, before))


def _walk(path: str, x: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(x, nn.Parameter):
        return
    if isinstance(x, _PLAIN):
        yield path, x
        return
    if not isinstance(x, _Container):  # they are made for the walk, and their numbers come again
        if id(x) in seen or len(seen) > _MOST:
            return
        seen.add(id(x))
    if isinstance(x, nn.Module):  # kept in a list, say, where torch does not find it
        for prefix, module in x.named_modules():
            if id(module) not in seen or module is x:
                yield from _walk_module(f"{path}.{prefix}." if prefix else f"{path}.", module, seen)
    elif isinstance(x, (Tensor, np.ndarray, set, frozenset, *GENERATORS)):
        yield path, x
    elif (container := _container(x)) is not None:
        yield path, container
        content = container.read()
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for i, (key, item) in enumerate(items):
            yield from _walk(f"{path}[{key if isinstance(key, _PLAIN) else f'#{i}'}]", item, seen)


def _generator(x: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    return next((access for kind, access in GENERATORS.items() if isinstance(x, kind)), None)


def _copy(x: Any) -> Any:
    if isinstance(x, _Container):
        return x.read()
    if isinstance(x, Tensor):
        return x if x.grad_fn is not None else (x.detach().clone(), x._version)
    if isinstance(x, np.ndarray | set):
        return x.copy()
    access = _generator(x)
    return x if access is None else access[0](x)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has numbers that can be read here."""
    return type(x) in (Tensor, nn.Buffer) and not x.is_meta


def _unchanged(x: Any, old: Any, value: Any) -> bool:
    if isinstance(x, Tensor):
        if x.grad_fn is not None or old.grad_fn is not None:
            return x is old
        return same(x.detach(), value[0]) if _is_plain(x) else x is old and x._version == value[1]
    if (access := _generator(x)) is not None:
        return x is old and repr(access[0](x)) == repr(value)
    return same(x, value)


def _put_back(x: Any, value: Any, path: str) -> None:
    if isinstance(x, _Container):
        x.write(value)
    elif isinstance(x, Tensor):
        if x.grad_fn is None and not _unchanged(x, x, value):
            if x.shape != value[0].shape:
                raise UnsupportedParameterError(
                    f"{path}: forward gives this tensor another size in place, so it cannot be put back after a "
                    f"forward beside the training. Assign a new tensor to the attribute instead."
                )
            with torch.no_grad():
                x.detach().copy_(value[0])
    elif isinstance(x, np.ndarray):
        x[...] = value
    elif isinstance(x, set):
        _refill(x, value)
    elif (access := _generator(x)) is not None:
        access[1](x, value)
