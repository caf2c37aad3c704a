"""The attributes of a module that its forward may read."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_
from typing import Any

from torch import Tensor, nn

from dpshard.interception.held_objects import PLAIN, is_foreign
from dpshard.interception.model_state import is_own, parts_of
from dpshard.names import modules_of

_DEEPEST = 4


class Attributes:
    """Attributes, buffers and sub-modules of a module, and the contents of objects among them, by identity.

    Call `leave_out_changed` after a forward to omit what the forward itself assigns.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._sized: list[dict[Any, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []  # with copies
        seen: set[int] = set()
        for _, each in modules_of(module):
            modules, buffers = parts_of(each)
            own = vars(each)
            self._add(modules, modules, seen, _DEEPEST)
            self._add(buffers, buffers, seen, _DEEPEST)
            self._add(own, [name for name in own if is_own(name) or name in ("forward", "training")], seen, 0)
        self._values = self._now()  # held, so that no other object reuses one of these identities
        self._sizes = [*map(len, self._sized)]

    def _add(self, owner: dict[Any, Any], keys: Collection[Any], seen: set[int], depth: int) -> None:
        self._sized.append(owner)
        for key in keys:
            self._owners.append(owner)
            self._keys.append(key)
            x = owner[key]
            if depth < _DEEPEST and id(x) not in seen and not isinstance(x, (Tensor, nn.Module, *PLAIN)):
                seen.add(id(x))
                held = x if isinstance(x, dict) else getattr(x, "__dict__", None)
                if isinstance(x, list):
                    self._lists.append((x, [*x]))
                    held = dict(enumerate(x))  # a copy, to look into the items
                if isinstance(held, dict) and not callable(x) and not is_foreign(type(x).__module__):
                    self._add(held, [*held], seen, depth + 1)

    def _now(self) -> list[Any]:
        return [*map(dict.get, self._owners, self._keys)]

    def are_unchanged(self) -> bool:
        """Return True if every attribute is the same object as before."""
        if not all(map(is_, self._values, map(dict.get, self._owners, self._keys))):
            return False
        return self._sizes == [*map(len, self._sized)] and all(_alike(*pair) for pair in self._lists)

    def leave_out_changed(self) -> None:
        """Forget the attributes that have changed since."""
        kept = [*map(is_, self._values, self._now())]
        for name in ("_owners", "_keys", "_values"):
            setattr(self, name, [x for x, same in zip(getattr(self, name), kept, strict=True) if same])
        self._lists = [pair for pair in self._lists if _alike(*pair)]
        same_size = [n == len(x) for n, x in zip(self._sizes, self._sized, strict=True)]
        self._sized = [x for x, same in zip(self._sized, same_size, strict=True) if same]
        self._sizes = [*map(len, self._sized)]


def _alike(x: list[Any], copy: list[Any]) -> bool:
    return len(x) == len(copy) and all(map(is_, x, copy))
