"""Selective activation checkpointing, which pairs the operators of a forward with those of its recomputation.

[Note: Selective checkpointing] For the n-th call of an operator in the recomputation, it returns the n-th kept output.
So both must run the same operators. A token serves several uses, so `unseen()` hides its operators. Taps detach their
output, which does not count.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_KEEPS = checkpoint._CachingTorchDispatchMode
_SELECTS: tuple[type[TorchDispatchMode], ...] = (_KEEPS, checkpoint._CachedTorchDispatchMode)


def operators_are_watched() -> bool:
    """Return True if any dispatch mode is active; selective checkpointing is one."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def unseen() -> Iterator[None]:
    """Hide operators from selective checkpointing only."""
    taken: list[Any] = []
    if operators_are_watched():
        while any(isinstance(mode, _SELECTS) for mode in _get_current_dispatch_mode_stack()):
            taken.append(_pop_mode())
    others = [mode for mode in reversed(taken) if not isinstance(mode, _SELECTS)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(taken):
            _push_mode(mode)


class KeptOutputs:
    """Outputs kept by selective checkpointing in one forward. It returns each once; two passes need each twice."""

    def __init__(self) -> None:
        self._storages: dict[int, dict[Any, Any]] = {}

    def note(self) -> None:
        """Note the checkpoints that are open now."""
        if operators_are_watched():
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, _KEEPS):
                    self._storages[id(mode.storage)] = mode.storage

    @contextmanager
    def handed_out_again(self) -> Iterator[None]:
        """Return a block that may consume kept outputs; afterwards they are available again."""
        storages = list(self._storages.values())
        self._storages.clear()
        before = [pytree.tree_map_only(checkpoint._VersionWrapper, _alias, dict(storage)) for storage in storages]
        yield
        for storage, kept in zip(storages, before, strict=True):
            storage.update(kept)


def _alias(output: Any) -> Any:
    """Copy a kept output: autograd gives the consumed one a graph."""
    alias = copy.copy(output)
    if isinstance(alias.val, torch.Tensor):
        alias.val = alias.val.detach()
    return alias
