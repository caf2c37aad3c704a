"""The time of a step, on a clock for products and one for each network.

docs/planning.md, Time, says what waits for what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpshard.applications.planner.hardware import Hardware

RELEASE_BYTES = 16
"""Per element: one read for the digest, a read and a write for noise."""
OPTIMIZER_BYTES = {"sgd": 12, "adamw": 28}
"""Per element."""


@dataclass(slots=True)
class Event:
    """Products, a collective, or "use"."""

    phase: str
    flops: int = 0
    kind: str = ""
    """"" for products, "use" of gathered parameters, or a collective."""
    dtype: str = ""
    nbytes: int = 0
    ranks: int = 1
    within_node: bool = True
    waits: bool = False

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of a collective."""
        return hardware.collective_seconds(self.kind, self.nbytes, self.ranks, within_node=self.within_node)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step."""

    phases: dict[str, float]
    computing: float
    sending: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.phases.values())


def replay(events: Iterable[Event], hardware: Hardware, precision: str, *, update_bytes: float = 0.0) -> Times:
    """Return the times of events."""
    speed = hardware.flops(precision)
    now = used = computing = 0.0
    free = {True: 0.0, False: 0.0}
    busy = {True: 0.0, False: 0.0}
    gathers: list[float] = []  # of parameters that were not used yet
    phases: dict[str, float] = {}
    for event in (*events, Event("update")):
        before = now
        if event.phase == "update" not in phases:
            now = max(now, *free.values())
        if event.kind == "use":
            now = used = max(now, gathers.pop(0)) if gathers else now
        elif event.kind:
            seconds = event.seconds(hardware)
            ahead = event.kind == "all-gather" and not event.waits
            end = max(free[event.within_node], used if ahead else now) + seconds
            free[event.within_node], busy[event.within_node] = end, busy[event.within_node] + seconds
            if ahead:
                gathers.append(end)
            elif event.waits:
                now = max(now, end)
        else:
            now, computing = now + event.flops / speed, computing + event.flops / speed
        phases[event.phase] = phases.get(event.phase, 0.0) + now - before
    phases["update"] += hardware.memory_seconds(update_bytes)
    return Times(phases, computing, max(busy.values()))


def update_bytes(elements: int, optimizer: str, *, private: bool) -> int:
    """Return the bytes of an update."""
    return elements * (OPTIMIZER_BYTES[optimizer] + (RELEASE_BYTES if private else 0))


def scaled(events: Iterable[Event], work: float) -> list[Event]:
    """Return the events of `work` times as many samples."""
    return [replace(event, flops=round(event.flops * work)) if event.flops else event for event in events]


def spread(events: Iterable[Event], ranks: int, others: int) -> list[Event]:
    """Return the events with collectives over `others` instead of `ranks`."""
    return [
        replace(event, ranks=others, within_node=False) if event.ranks == ranks and not event.within_node else event
        for event in events
    ]


def parallel_share(throughputs: Sequence[tuple[int, float]]) -> float:
    """Fit Amdahl's parallel share p to (nodes, samples a second): 1 / speedup = 1 - p + p / nodes."""
    (first, base), *rest = throughputs
    above = below = 0.0
    for nodes, throughput in rest:
        n, inverse = nodes / first, base / throughput
        above += (1 - inverse) * (1 - 1 / n)
        below += (1 - 1 / n) ** 2
    return above / below
