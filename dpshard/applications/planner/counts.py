"""Counts of one step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dpshard.applications.planner.timeline import Event

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"
ACTIVATIONS, RECORDS = "activations", "records"
PARTS: tuple[str, ...] = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, RECORDS)

Bytes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of a kind."""

    calls: int
    nbytes: int
    """Of whole tensors."""


@dataclass(eq=False, slots=True)
class Memory:
    """Memory of a tensor."""

    nbytes: int
    part: str
    """It may become known after the memory is taken."""
    recorded: bool = False
    reference: weakref.ref[Any] | None = None


Change = tuple[Memory, int | None]
"""Memory and its additional bytes, or None if it becomes a record."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Costs of one step."""

    events: tuple[Event, ...]
    peaks: tuple[Bytes, ...]
    """Most memory since the last event."""
    ends: tuple[Bytes, ...]

    @classmethod
    def read(cls, log: Iterable[Event | Change]) -> Counts:
        """Return the counts of events and changes of memory in their order."""
        sizes: dict[Memory, int] = {}
        records: set[Memory] = set()
        now = dict.fromkeys(PARTS, 0)
        best: Bytes = ()
        events, peaks, ends = [], [], []
        for entry in log:
            if isinstance(entry, Event):
                events.append(entry)
                peaks.append(best)
                best = tuple(now.values())
                ends.append(best)
                continue
            memory, nbytes = entry
            held = sizes.get(memory, 0)
            if nbytes is None:
                records.add(memory)
                now[memory.part] -= held
                now[RECORDS] += held
                continue
            sizes[memory] = held + nbytes
            now[RECORDS if memory in records else memory.part] += nbytes
            if not best or sum(now.values()) > sum(best):
                best = tuple(now.values())
        return cls(tuple(events), tuple(peaks), tuple(ends))

    @property
    def flops(self) -> int:
        """Operations of all products."""
        return sum(event.flops for event in self.events)

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return max(map(sum, self.peaks))

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """Return collectives by (kind, dtype)."""
        found: dict[tuple[str, str], Traffic] = {}
        for event in self.events:
            if event.dtype:
                key = event.kind, event.dtype
                before = found.get(key, Traffic(0, 0))
                found[key] = Traffic(before.calls + 1, before.nbytes + event.nbytes)
        return dict(sorted(found.items()))

    def parts(self) -> dict[str, int]:
        """Return bytes at the peak."""
        return dict(zip(PARTS, max(self.peaks, key=sum), strict=True))
