"""Pinned memory, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_SLAB = 2**28
"""Bytes of a slab. torch rounds pinned memory up to powers of two, which would waste a third."""
_ALIGNED = 2**9


@dataclass(slots=True, eq=False)
class Slab:
    """Memory that is cut from the front, and reused once all cuts are given back."""

    memory: Tensor
    """uint8 [n], pinned"""
    used: int = 0
    cuts: int = 0
    read: Any = None
    """Event of the last copy from here to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A part of a slab."""

    slab: Slab
    memory: Tensor
    """uint8 [n]"""

    def let_go(self) -> None:
        """Give the part back."""
        self.slab.cuts -= 1


class Pinned:
    """The slabs of one device. `allocate(n)` returns pinned uint8 [n]."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._slabs: list[Slab] = []

    def cut(self, nbytes: int) -> tuple[Cut, Any]:
        """Return pinned memory, and the event to await before writing."""
        for slab in self._slabs:
            if slab.cuts == 0:
                slab.used = 0
            if slab.used + nbytes <= len(slab.memory):
                break
        else:
            slab = Slab(self._allocate(max(_SLAB, 1 << (nbytes - 1).bit_length())))
            self._slabs.append(slab)
        before = None
        if slab.used == 0:
            before, slab.read = slab.read, None
        memory = slab.memory[slab.used : slab.used + nbytes]
        slab.used += -(-nbytes // _ALIGNED) * _ALIGNED
        slab.cuts += 1
        return Cut(slab, memory), before
