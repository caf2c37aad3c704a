"""Which records leave the device, and when they return."""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from dpshard.errors import ConfigurationError
from dpshard.records.numerics import checksum
from dpshard.records.offload.copies import WINDOW, Away, Copies, Gpu
from dpshard.records.offload.self_test import needs_the_cpu
from dpshard.records.offload.storages import Storage, View, Waiting, bytes_of
from dpshard.records.record import Record
from dpshard.records.written import versions

RESERVE = 1 / 8
"""Share of the memory that "auto" keeps free."""


class Offload:
    """The waiting records. `keep`: "auto", or the GiB that stay on the device."""

    def __init__(self, keep: float | Literal["auto"], gpu: Callable[[torch.device], Gpu] | None = None) -> None:
        self._auto, self._limit = keep == "auto", math.inf if keep == "auto" else keep * 2**30
        self._make = gpu
        self._opened: tuple[Gpu, Copies] | None = None  # at the first record
        self._here = 0  # bytes of waiting records on the device
        self._known: weakref.WeakValueDictionary[tuple[int, int], Storage] = weakref.WeakValueDictionary()
        self._victims: list[tuple[float, int, weakref.ref[Storage]]] = []  # heap: the next one to leave first
        self._arrivals, self._clock = itertools.count(), itertools.count()
        self._turn: dict[str, int] = {}  # when a parameter was last summed
        self._returning: list[weakref.ref[Storage]] = []  # the next one last
        self._differing: list[Tensor] = []

    @property
    def _gpu(self) -> Gpu:
        assert self._opened is not None
        return self._opened[0]

    @property
    def _copies(self) -> Copies:
        assert self._opened is not None
        return self._opened[1]

    def bundles_small(self) -> bool:
        """Return True if small records may wait for others."""
        return self._auto  # the memory in use includes them

    def wait(self, name: str, record: Record) -> Waiting:
        """Take a measured record; offload records that do not fit."""
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        tensors = {key: x for key, x in values.items() if isinstance(x, Tensor)}
        if self._opened is None:
            device = next(iter(tensors.values())).device
            if self._make is None and device.type == "cpu":
                return Waiting(name, type(record), values, versions(record))  # in the host's memory
            self._opened = self._open(device)
        views = self._take(name, tensors)
        return Waiting(name, type(record), {**values, **views})

    def _open(self, device: torch.device) -> tuple[Gpu, Copies]:
        if self._make is not None:
            gpu = self._make(device)
            return gpu, Copies(gpu)
        if device.type != "cuda":
            raise ConfigurationError(
                f"offload_records copies records from CUDA devices, not from {device}. Leave it out, or choose "
                f'clipping_mode="mixed-ghost", which keeps no records.'
            )
        gpu = Gpu(device)
        return gpu, Copies(gpu, synchronous=needs_the_cpu(device))

    def expect(self, waiting: Sequence[Waiting]) -> None:
        """Begin to return these records, because their sums come next."""
        coming = sorted(waiting, key=lambda w: self._turn.get(w.name, 0), reverse=True)
        self._returning = [weakref.ref(storage) for w in coming for storage in w.storages()] + self._returning
        self._return_some()

    def fetch(self, waiting: Waiting) -> tuple[Record, Tensor | None]:
        """Return a record, and whether it differs from the one that was taken: bool [], None if it never left."""
        self._turn[waiting.name] = next(self._clock)
        values = {key: self._fetched(x) if isinstance(x, View) else x for key, x in waiting.values.items()}
        self._return_some()
        if self._opened is not None and not self._returning:
            self._copies.settle()
        differs = [storage.differs for storage in waiting.storages() if storage.differs is not None]
        waiting.require_unwritten()
        return waiting.kind(**values), torch.stack(differs).any() if differs else None

    def take_differing(self) -> Tensor | None:
        """Return, once, whether any returned record differed: bool [], None without one."""
        found, self._differing = self._differing, []
        return torch.stack(found).any() if found else None

    def _take(self, name: str, tensors: dict[str, Tensor]) -> dict[str, View]:
        if not self._known:  # a backward pass begins
            self._victims.clear()
            self._returning.clear()
            if self._auto:
                self._limit = (1 - RESERVE) * self._gpu.could_be_taken()
        views = {key: self._view(name, x) for key, x in tensors.items() if x.device == self._gpu.device}
        while self._victims and self._excess() > 0:
            storage = heapq.heappop(self._victims)[2]()
            if storage is not None:
                self._leave(storage)
        return views

    def _view(self, name: str, x: Tensor) -> View:
        x = x.detach().resolve_conj().resolve_neg()
        if 2 * x.nbytes < x.untyped_storage().nbytes():
            x = x.clone(memory_format=torch.contiguous_format)  # a small view would keep, or offload, its whole storage
        # A tensor that was written has another version.
        key = x.untyped_storage()._cdata, x._version
        storage = self._known.get(key)
        if storage is None or storage.nbytes != x.untyped_storage().nbytes():
            storage = self._known[key] = Storage(x, name, self._drop)
            self._here += storage.nbytes
            # The record that is summed last has most time to return (Belady 1966).
            turn = -self._turn.get(name, math.inf)
            heapq.heappush(self._victims, (turn, next(self._arrivals), weakref.ref(storage)))
        elif storage.checksum is not None:
            self._compare(storage, storage.checksum, bytes_of(x))  # a write through `.data` leaves the version as it is
        return View(storage, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def _excess(self) -> float:
        taken = self._gpu.taken() - self._copies.leaving if self._auto else self._here
        return taken - self._limit

    def _leave(self, storage: Storage) -> None:
        if isinstance(storage.place, Tensor):
            storage.leave(self._copies)
            self._here -= storage.nbytes

    def _drop(self, storage: Storage) -> None:
        if isinstance(storage.place, Away):
            self._copies.forget(storage.place)
        else:
            self._here -= storage.nbytes

    def _return_some(self) -> None:
        while self._returning and self._copies.arriving < WINDOW:
            storage = self._returning.pop()()
            if storage is not None and isinstance(storage.place, Away):
                self._copies.begin_return(storage.place)

    def _fetched(self, view: View) -> Tensor:
        storage = view.storage
        if isinstance(storage.place, Away):
            storage.place = self._copies.fetch(storage.place)
            self._here += storage.nbytes
            assert storage.checksum is not None  # it has left
            self._compare(storage, storage.checksum, storage.place[: storage.nbytes])
        storage.require_unwritten()
        return view.on(storage.place)

    def _compare(self, storage: Storage, left: Tensor, now: Tensor) -> None:
        differs = checksum(now) != left
        storage.differs = differs if storage.differs is None else storage.differs | differs
        self._differing.append(differs)
