"""Sums clipped sums over ranks, directly into each rank's fragments.

[Note: Why DeepSpeed does not reduce] DeepSpeed rounds gradients to the parameter's dtype, averages them, and divides by
the accumulation steps. At stage 3 it re-applies a stale gradient of an unused parameter. So it gets clipped sums only
with their noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.backends.collectives import reduce_scatter
from dpshard.backends.deepspeed.partitions import ZeroLayout
from dpshard.backends.grad_store import add
from dpshard.errors import LogicalBatchError

BUCKET = 2**25
"""Elements per reduction; a larger parameter is a bucket of its own."""

_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Size, dtype and device of a whole clipped sum."""

    numel: int
    dtype: torch.dtype
    """float64 for float64 parameters, else float32"""
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    names: list[str]
    result: Tensor
    kept: Tensor  # input of the collective, which must outlive it
    work: dist.Work


class Reducer:
    """The running sums of one logical batch."""

    def __init__(
        self, layout: ZeroLayout, shapes: Mapping[str, Shape], group: dist.ProcessGroup, *, late: bool
    ) -> None:
        self.layout, self.shapes, self.group = layout, shapes, group
        self.late = late
        """True to keep whole sums until `complete`: one reduction, more memory."""
        self.passes = 0
        """Backward passes that have ended, equal on all ranks."""
        self._buckets = _buckets(shapes)
        self._next = 0
        self._sums: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self._held: dict[str, Tensor] = {}
        self._flights: deque[_Flight] = deque()
        self._totals: dict[int, Tensor] = {}

    def put(self, name: str, clipped_sum: Tensor | None) -> None:
        """Add this rank's clipped sum of a parameter, if any."""
        if name in self._arrived:
            raise LogicalBatchError(f"{name} was summed twice in one backward pass: a sample would count twice.")
        self._arrived.add(name)
        if clipped_sum is not None:
            add(self._sums, name, clipped_sum.to(self.shapes[name].dtype).reshape(-1))
        while not self.late and self._next < len(self._buckets):
            if not self._arrived.issuperset(self._buckets[self._next]):
                break
            self._launch()

    def finish(self) -> None:
        """End a backward pass: reduce the rest, and wait."""
        self._arrived.clear()
        self.passes += 1
        if not self.late:
            self._reduce()
            return
        for name in list(self._sums):
            add(self._held, name, self._sums.pop(name))

    def complete(self) -> None:
        """Reduce late sums."""
        if self.late:
            self._reduce()

    def _reduce(self) -> None:
        while self._next < len(self._buckets):
            self._launch()
        while self._flights:
            self._land()
        self._next = 0

    def abandon(self) -> None:
        """Drop a failed backward pass; buckets in flight still arrive."""
        while self._flights:
            self._land()
        self._sums.clear()
        self._arrived.clear()
        self._next = 0

    def clear(self) -> None:
        """Drop all sums."""
        self.abandon()
        self._held.clear()
        self._totals.clear()

    def take(self) -> dict[int, Tensor]:
        """Return the summed fragments by id of the master; restart at zero."""
        for name in self.shapes:
            self.fragment(name)
        totals, self._totals = self._totals, {}
        return totals

    def fragment(self, name: str, totals: dict[int, Tensor] | None = None) -> Tensor:
        """Return this rank's view [length] of a sum."""
        totals = self._totals if totals is None else totals
        place, shape = self.layout.fragments[name], self.shapes[name]
        if id(place.master) not in totals:
            totals[id(place.master)] = torch.zeros(place.master.shape, dtype=shape.dtype, device=shape.device)
        return totals[id(place.master)][place.offset : place.offset + place.length]

    def _whole(self, name: str) -> Tensor:
        total = (self._held if self.late else self._sums).pop(name, None)
        shape = self.shapes[name]
        return torch.zeros(shape.numel, dtype=shape.dtype, device=shape.device) if total is None else total

    def _launch(self) -> None:
        names, chunks = self._buckets[self._next], self.layout.chunks
        self._next += 1
        if chunks is None:
            # A reduce-scatter would be mostly padding.
            full = result = torch.cat([self._whole(name) for name in names])
            work = dist.all_reduce(full, group=self.group, async_op=True)
        else:
            ranks = dist.get_world_size(self.group)
            rows = []
            for name in names:
                row = self._whole(name)
                padding = ranks * chunks[name] - row.numel()
                rows.append(torch.nn.functional.pad(row, (0, padding)).view(ranks, chunks[name]))
            full = torch.cat(rows, 1).contiguous()
            result = full.new_empty(full.shape[1])
            work = reduce_scatter(result, full.view(-1), group=self.group, async_op=True)
        assert work is not None
        self._flights.append(_Flight(names, result, full, work))
        while len(self._flights) > _IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        flight, chunks = self._flights.popleft(), self.layout.chunks
        flight.work.wait()
        offset = 0
        for name in flight.names:
            place = self.layout.fragments[name]
            start = offset + (place.start if chunks is None else 0)
            self.fragment(name).add_(flight.result[start : start + place.length])
            offset += self.shapes[name].numel if chunks is None else chunks[name]


def _buckets(shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Return names in reverse order, in runs of one dtype."""
    buckets: list[list[str]] = []
    elements, kind = BUCKET, None
    for name, shape in reversed(list(shapes.items())):
        if elements + shape.numel > BUCKET or (shape.dtype, shape.device) != kind:
            buckets.append([])
            elements, kind = 0, (shape.dtype, shape.device)
        buckets[-1].append(name)
        elements += shape.numel
    return buckets
