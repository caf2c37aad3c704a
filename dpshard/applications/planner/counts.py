"""Counts of one step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Counts:
    """Costs of one step."""

    events: tuple[Event, ...]
    peaks: tuple[Bytes, ...]
    """Most memory since the last event."""
    ends: tuple[Bytes, ...]

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


@dataclass(slots=True)
class Memory:
    """Memory of a tensor."""

    nbytes: int
    part: str
    recorded: int | None = None
    reference: weakref.ref[Any] | None = None


@dataclass(slots=True)
class MemoryLog:
    """Changes of memory. Which part a storage belongs to may become known after its change."""

    entries: list[tuple[Memory | None, int]] = field(default_factory=list)
    """Additional bytes; None is an event."""

    def restart(self, live: Iterable[Memory]) -> None:
        """Begin anew with the storages that live."""
        self.entries = []
        for storage in live:
            storage.recorded = storage.recorded if storage.recorded is None else -1
            self.entries.append((storage, storage.nbytes))

    def add(self, storage: Memory, nbytes: int) -> None:
        """Note that a storage grew."""
        self.entries.append((storage, nbytes))

    def record(self, storage: Memory) -> None:
        """Note that a storage became a record."""
        storage.recorded = len(self.entries)
        self.entries.append((storage, 0))

    def event(self) -> None:
        """Note an event."""
        self.entries.append((None, 0))

    def read(self) -> tuple[tuple[Bytes, ...], tuple[Bytes, ...]]:
        """Return Counts.peaks and Counts.ends."""
        sizes: dict[int, int] = {}
        now = dict.fromkeys(PARTS, 0)
        total, most = 0, -1
        best: Bytes = ()
        peaks, ends = [], []
        for place, (storage, nbytes) in enumerate([*self.entries, (None, 0)]):
            if storage is None:
                peaks.append(best)
                best, most = tuple(now.values()), total
                ends.append(best)
                continue
            held = sizes.get(id(storage), 0)
            sizes[id(storage)] = held + nbytes
            if storage.recorded == place:
                now[storage.part] -= held
                now[RECORDS] += held
            was_record = storage.recorded is not None and storage.recorded <= place
            now[RECORDS if was_record else storage.part] += nbytes
            total += nbytes
            if total > most:
                best, most = tuple(now.values()), total
        return tuple(peaks), tuple(ends)
