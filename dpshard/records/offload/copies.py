"""Copies between the device and pinned memory, each on its own stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpshard.records.offload.pinned import Cut, Pinned

WINDOW = 2**28
"""Most bytes that leave while they still hold device memory, and most that return early."""


class Gpu:
    """Operations of a GPU; tests simulate one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """Return the computation's stream."""
        return torch.cuda.current_stream(self.device)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def pinned(self, nbytes: int) -> Tensor:
        """Return pinned uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, nbytes: int) -> Tensor:
        """Return uint8 [nbytes] of the device, in the current stream's order."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Begin a copy on `stream`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def taken(self) -> int:
        """Return the bytes that all tensors take on the device."""
        return self._bytes("allocated_bytes")

    def could_be_taken(self) -> int:
        """Return the bytes that tensors could take, with free memory and that of the allocator."""
        return torch.cuda.mem_get_info(self.device)[0] + self._bytes("reserved_bytes")

    def _bytes(self, kind: str) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device)[kind]["all"]["current"]


@dataclass(slots=True, eq=False)
class Away:
    """Bytes in pinned memory."""

    cut: Cut | None
    left: Any
    """Event after which pinned memory holds them."""
    nbytes: int
    room: Tensor | None = None
    """Device memory for their return: uint8, at least `nbytes` long."""
    arrived: Any = None
    """Event after which `room` holds them."""
    stream: Any = None
    """Stream in whose order `room` was allocated."""


class Copies:
    """The copies of one device. `synchronous`: the CPU waits for every event."""

    def __init__(self, gpu: Gpu, *, synchronous: bool = False, window: int = WINDOW) -> None:
        self._gpu, self._synchronous, self._window = gpu, synchronous, window
        self._leaving: deque[tuple[Tensor, Any, Any]] = deque()  # with the event of the copy, and the stream of use
        self._arriving: set[Away] = set()
        self.leaving = 0
        """Bytes that leave while they still hold device memory."""
        self.arriving = 0
        """Bytes that return ahead of use."""
        self._out, self._into = gpu.stream(), gpu.stream()
        self._pinned = Pinned(gpu.pinned)

    def leave(self, x: Tensor) -> Away:
        """Copy `x` (uint8 [n]) to the host; the caller may drop it, and must not write it."""
        compute = self._gpu.current()
        cut, before = self._pinned.cut(len(x))
        self._after(self._out, compute.record_event())
        if before is not None:
            self._after(self._out, before)
        self._gpu.copy(cut.memory, x, self._out)
        away = Away(cut, self._out.record_event(), len(x))
        # Keep the memory until its stream has waited.
        self._leaving.append((x, away.left, compute))
        self.leaving += x.nbytes
        while len(self._leaving) > 1 and self.leaving > self._window:
            self._free_oldest()
        return away

    def _free_oldest(self) -> None:
        x, left, stream = self._leaving[0]
        self._after(stream, left)
        self._leaving.popleft()
        self.leaving -= x.nbytes

    def begin_return(self, away: Away) -> None:
        """Begin the copy to the device, unless it has begun."""
        if away.cut is None:
            return
        compute = self._gpu.current()
        away.room, away.stream = self._gpu.empty(-(-away.nbytes // 16) * 16), compute  # whole elements of any dtype
        self._after(self._into, compute.record_event())
        self._after(self._into, away.left)
        self._gpu.copy(away.room[: away.nbytes], away.cut.memory, self._into)
        away.arrived = away.cut.slab.read = self._into.record_event()
        away.cut.let_go()
        away.cut = None
        self._arriving.add(away)
        self.arriving += away.nbytes

    def fetch(self, away: Away) -> Tensor:
        """Return the bytes on the device, uint8 [n or a little more], once."""
        self.begin_return(away)
        compute, room = self._gpu.current(), away.room
        assert room is not None
        self._after(compute, away.arrived)
        if compute != away.stream:
            self._after(away.stream, away.arrived)
            room.record_stream(compute)  # allocated in another stream's order
        self._arriving.remove(away)
        self.arriving -= away.nbytes
        away.room = None
        return room

    def forget(self, away: Away) -> None:
        """Drop bytes that no sum needs."""
        if away.cut is not None:
            away.cut.let_go()
        elif away in self._arriving:
            self._arriving.remove(away)
            self.arriving -= away.nbytes
            self._after(away.stream, away.arrived)  # the copy still writes to memory that is now free
        away.cut = away.room = None

    def settle(self) -> None:
        """Free the device memory of records that left."""
        while self._leaving:
            self._free_oldest()

    def __del__(self) -> None:
        for away in list(self._arriving):
            self.forget(away)
        self.settle()

    def _after(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)
        if self._synchronous:
            event.synchronize()
