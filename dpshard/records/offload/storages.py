"""The storages in which records wait: on the device, or away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpshard.records.numerics import checksum
from dpshard.records.offload.copies import Away, Copies
from dpshard.records.owned import OwnMemory
from dpshard.records.written import changed_in_backward, versions


class Storage:
    """The bytes of one storage. `drop` is called with it when no record needs it."""

    def __init__(self, x: Tensor, name: str, drop: Callable[[Storage], None]) -> None:
        self.place: Tensor | Away = bytes_of(x)
        """On the device: uint8 [n or a little more]."""
        self.nbytes, self.name = self.place.nbytes, name
        self._watched: Tensor | None = x.detach()  # its version counts writes, until it has left
        self._version = x._version
        # While it lives, no other storage gets this address.
        self._source = StorageWeakRef(x.untyped_storage())
        self.checksum: Tensor | None = None
        """Checksum of the bytes that left."""
        self.differs: Tensor | None = None
        """bool []: True if other bytes returned."""
        self._drop = drop

    def copy_bytes(self) -> None:
        """Copy bytes on the device, which others may write."""
        if isinstance(self.place, Tensor):
            self.require_unwritten()
            self._watched = None
            self.place = self.place.clone()

    def require_unwritten(self) -> None:
        """Raise LogicalBatchError unless the bytes on the device are as they came."""
        if self._watched is not None and self._watched._version != self._version:
            raise changed_in_backward(self.name)

    def leave(self, copies: Copies) -> None:
        """Let the bytes leave."""
        assert isinstance(self.place, Tensor)
        self.require_unwritten()
        self._watched = None
        self.checksum = checksum(self.place)
        self.place = copies.leave(self.place)

    def __del__(self) -> None:
        self._drop(self)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a storage."""

    storage: Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements before it."""

    def on(self, memory: Tensor) -> Tensor:
        """Return the tensor in the storage's bytes."""
        whole = memory[: len(memory) // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record that waits for its sum."""

    name: str
    """Parameter."""
    kind: type[Any]
    values: dict[str, Any]
    """Fields of the record; tensors may be views."""
    versions: int | None = None
    """Sum of the versions of tensors that stay."""

    def storages(self) -> list[Storage]:
        """Return the storages of its views."""
        return [value.storage for value in self.values.values() if isinstance(value, View)]

    def require_unwritten(self) -> None:
        """Raise LogicalBatchError unless the tensors that stay are as they were."""
        if self.versions is not None and versions(self.kind(**self.values)) != self.versions:
            raise changed_in_backward(self.name)

    def copied(self, memory: OwnMemory) -> Waiting:
        """Return the record in its own memory."""
        for storage in self.storages():
            storage.copy_bytes()
        self.require_unwritten()
        values = {key: memory.copy(x) if isinstance(x, Tensor) else x for key, x in self.values.items()}
        return replace(self, values=values, versions=None)  # nothing else writes to the copies


def bytes_of(x: Tensor) -> Tensor:
    """Return the storage of `x`, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
