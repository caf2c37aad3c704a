"""Refuse writes into parameters outside training, before they happen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpshard.errors import UnsupportedParameterError
from dpshard.rules.modes import Passthrough


class ParameterWrites(TorchDispatchMode):
    """Refuses writes into parameters, also through views, `.data` and no_grad."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {_storage(p): (name, p) for name, p in model.named_parameters() if _is_local(p)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not Passthrough.on:
            for x in _written(func, args, kwargs or {}):
                name, p = self._known.get(_storage(x), ("", x))
                # ZeRO-3 frees a parameter's storage after each module, and other tensors may then take it.
                if name and _storage(p) == _storage(x):
                    raise written(name)
        return func(*args, **(kwargs or {}))


class WriteGuard:
    """Runs forwards that must not write."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._scripted = False  # torch.jit.script refuses modes

    def run(self, forward: Callable[[], Any], rewind: Callable[[], None]) -> Any:
        """Return the result of `forward`; `rewind` precedes a second try."""
        if not self._scripted:
            try:
                with ParameterWrites(self._model):
                    return forward()
            except RuntimeError as error:
                if "TorchScript" not in str(error):
                    raise
                self._scripted = True
                rewind()
        return forward()


def written(name: str) -> UnsupportedParameterError:
    """Return the error for a write into parameter `name`."""
    return UnsupportedParameterError(
        f"{name}: forward writes values that depend on the samples into this parameter, without noise. "
        f"Initialise from data before training, on data that are not private (ActNorm: run one forward, or load "
        f"weights, before making the engine). An nn.Embedding must not have max_norm: renormalise all its rows between "
        f"steps."
    )


def _is_local(p: Tensor) -> bool:
    return type(p) is nn.Parameter and p.untyped_storage().nbytes() > 0


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@functools.cache
def _places(func: Any) -> tuple[tuple[int, str], ...]:
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for place, name in _places(func):
        x = args[place] if place < len(args) else kwargs.get(name)
        found += [y for y in (x if isinstance(x, list | tuple) else [x]) if type(y) in (Tensor, nn.Parameter)]
    return found
