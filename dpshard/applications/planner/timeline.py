"""The time of a step: its products and collectives, replayed on two clocks.

[Note: What waits for what]
A GPU computes while the network sends. The replay has a clock for products and one for each network. It follows FSDP2:
- A unit's products wait for its all-gather. That all-gather begins when the products of the unit before it begin:
  FSDP2 gathers one unit ahead.
- A reduction begins when its gradients are there. The update waits for all of them.
- Collectives of tensor and context parallelism stand in the middle of a layer: products wait for each.
- The update waits for each of its collectives.
All-layer clipping in one pass reduces all gradients at the end of backward. So its network is idle first and late then,
which the replay shows, and a sum of bytes would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpshard.applications.planner.hardware import Hardware

RELEASE_BYTES = 16
"""Bytes that a release moves per element of a shard. The digest reads the sum, the noise reads and writes it."""
OPTIMIZER_BYTES = {"sgd": 12, "adamw": 28}
"""Bytes that the update moves per element in float32: parameter, gradient and states, read and written."""


@dataclass(slots=True)
class Event:
    """Products, or one collective, or the use of gathered parameters."""

    phase: str
    flops: int = 0
    kind: str = ""
    """"all-gather", "reduce-scatter", "all-reduce", "broadcast", or "use" of what was gathered; "" for products."""
    dtype: str = ""
    """Of a collective's tensors."""
    nbytes: int = 0
    ranks: int = 1
    within_node: bool = True
    waits: bool = False
    """True if products wait for this collective."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step of one rank."""

    phases: dict[str, float]
    """By phase; waits for the network count where they occur."""
    computing: float
    """Products, without any wait."""
    sending: float
    """The busier of the two networks, without any wait."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.phases.values())


def replay(events: Iterable[Event], hardware: Hardware, precision: str, *, update_bytes: float = 0.0) -> Times:
    """Return the times of a step's events; see [Note: What waits for what].

    `update_bytes` are what noise and optimizer read and write of the GPU's memory.
    """
    speed = hardware.flops(precision)
    now = used = computing = 0.0
    free = {True: 0.0, False: 0.0}  # when each network is free: within nodes, between them
    busy = {True: 0.0, False: 0.0}
    gathers: list[float] = []  # ends of all-gathers whose parameters were not used yet
    phases: dict[str, float] = {}
    for event in (*events, Event("update")):
        before = now
        if event.phase == "update" not in phases:
            now = max(now, *free.values())  # the update needs all sums
        if event.kind == "use":
            now = used = max(now, gathers.pop(0)) if gathers else now
        elif event.kind:
            seconds = hardware.collective_seconds(event.kind, event.nbytes, event.ranks, within_node=event.within_node)
            ahead = event.kind == "all-gather" and not event.waits
            end = max(free[event.within_node], used if ahead else now) + seconds
            free[event.within_node], busy[event.within_node] = end, busy[event.within_node] + seconds
            if ahead:
                gathers.append(end)
            elif event.waits:
                now = max(now, end)
        else:
            now, computing = now + event.flops / speed, computing + event.flops / speed
        phases[event.phase] = phases.get(event.phase, 0.0) + now - before  # micro-batches repeat phases
    phases["update"] += hardware.memory_seconds(update_bytes)
    return Times(phases, computing, max(busy.values()))


def update_bytes(elements: int, optimizer: str, *, private: bool) -> int:
    """Return the bytes that an update of a shard of so many elements reads and writes."""
    return elements * (OPTIMIZER_BYTES[optimizer] + (RELEASE_BYTES if private else 0))


def scaled(events: Iterable[Event], work: float) -> list[Event]:
    """Return the events of a micro-batch that is `work` times as large: parameters and their gradients stay."""
    return [replace(event, flops=round(event.flops * work)) if event.flops else event for event in events]


def spread(events: Iterable[Event], ranks: int, others: int) -> list[Event]:
    """Return the events if the collectives over `ranks` were over `others`."""
    return [
        replace(event, ranks=others, within_node=False) if event.ranks == ranks and not event.within_node else event
        for event in events
    ]


def parallel_share(throughputs: Sequence[tuple[int, float]]) -> float:
    """Return Amdahl's parallel share p, fitted to (nodes, samples a second): 1 / speedup = 1 - p + p / nodes.

    Least squares in p over all points, relative to the first; 1 is perfect scaling.
    """
    (first, base), *rest = throughputs
    above = below = 0.0
    for nodes, throughput in rest:
        n, inverse = nodes / first, base / throughput
        above += (1 - inverse) * (1 - 1 / n)
        below += (1 - 1 / n) ** 2
    return above / below
