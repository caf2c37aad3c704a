"""Selective activation checkpointing.

[Note: Selective checkpointing] It pairs the n-th call of an operator in forward with the n-th in recomputation. A token
serves several uses, so recomputation does not repeat its operators: `unseen()` hides them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from dpshard.rules.modes import without_modes

_KEEPS = checkpoint._CachingTorchDispatchMode
_SELECTS: tuple[type[TorchDispatchMode], ...] = (_KEEPS, checkpoint._CachedTorchDispatchMode)


def operators_are_watched() -> bool:
    """Return True if any dispatch mode is active."""
    return torch._C._len_torch_dispatch_stack() > 0


def unseen() -> AbstractContextManager[None]:
    """Hide operators from selective checkpointing only."""
    if not operators_are_watched():
        return nullcontext()
    return without_modes(_get_current_dispatch_mode_stack, _pop_mode, _push_mode, _selects)


def _selects(mode: TorchDispatchMode) -> bool:
    return isinstance(mode, _SELECTS)


class KeptOutputs:
    """Outputs that selective checkpointing keeps in a forward. It returns each once; two passes need each twice."""

    def __init__(self) -> None:
        self._storages: dict[int, dict[Any, Any]] = {}

    def note(self) -> None:
        """Remember the storages of the active checkpoints."""
        if operators_are_watched():
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, _KEEPS):
                    self._storages[id(mode.storage)] = mode.storage

    @contextmanager
    def handed_out_again(self) -> Iterator[None]:
        """Return a context that restores, at its end, the outputs consumed in it."""
        storages = list(self._storages.values())
        self._storages.clear()
        before = [pytree.tree_map_only(checkpoint._VersionWrapper, _alias, dict(storage)) for storage in storages]
        yield
        for storage, kept in zip(storages, before, strict=True):
            storage.update(kept)


def _alias(output: Any) -> Any:
    alias = copy.copy(output)
    if isinstance(alias.val, torch.Tensor):
        alias.val = alias.val.detach()
    return alias
