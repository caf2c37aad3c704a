"""Selective activation checkpointing, which counts the operators of a forward to find those of its recomputation.

[Note: Selective checkpointing]
It keeps the n-th output of every operator that its policy names, and hands it to the n-th call of the recomputation.
So both must run the same operators. Tokens, which are made once for several uses, are made in a block of `unseen()`.
Taps detach their output, which selective checkpointing does not count.
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
    """Whether a mode looks at the operators: selective checkpointing may be one."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def unseen() -> Iterator[None]:
    """Hide operators from selective checkpointing, and from no other mode."""
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
    """What selective checkpointing has kept of one forward: it hands an output out once, and two passes take two."""

    def __init__(self) -> None:
        self._storages: dict[int, dict[Any, Any]] = {}

    def note(self) -> None:
        """Note the checkpoints in which the forward is now."""
        if operators_are_watched():
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, _KEEPS):
                    self._storages[id(mode.storage)] = mode.storage

    @contextmanager
    def handed_out_again(self) -> Iterator[None]:
        """Return a block after which everything that was handed out within may be handed out once more."""
        storages = list(self._storages.values())
        self._storages.clear()
        before = [pytree.tree_map_only(checkpoint._VersionWrapper, _alias, dict(storage)) for storage in storages]
        yield
        for storage, kept in zip(storages, before, strict=True):
            storage.update(kept)


def _alias(output: Any) -> Any:
    """Return a kept output as a tensor of its own: autograd gives the one that is handed out a graph."""
    alias = copy.copy(output)
    if isinstance(alias.val, torch.Tensor):
        alias.val = alias.val.detach()
    return alias
