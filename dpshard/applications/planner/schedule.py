"""The 1F1B schedule.

A stage first runs one forward for each stage from itself to the last. Then it alternates backwards and forwards, and
ends with the remaining backwards. A transfer begins when the sender has its result and the receiver is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpshard.applications.planner.stage_simulation import BACKWARD, FORWARD, SUMS, UPDATE, StageCounts

Step = tuple[str, int]
"""FORWARD or BACKWARD, and the index of the micro-batch."""


def order_of(stage: int, stages: int, parts: int) -> list[Step]:
    """Return the forwards and backwards of a stage, in order."""
    ahead = min(parts, stages - stage)
    order: list[Step] = [(FORWARD, i) for i in range(ahead)]
    for i in range(parts):
        order.append((BACKWARD, i))
        if i + ahead < parts:
            order.append((FORWARD, i + ahead))
    return order


@dataclass(frozen=True, slots=True)
class Walk:
    """The times at which stages end their work."""

    ends: tuple[float, ...]
    last_backwards: tuple[float, ...]

    @property
    def span(self) -> float:
        """Seconds of the schedule."""
        return max(self.ends)


def walk(forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], parts: int) -> Walk:
    """Return when stages end, given seconds of a part on each, and of each transfer."""
    stages = len(forward)
    orders = [order_of(s, stages, parts) for s in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    places, free, begins = [0] * stages, [0.0] * stages, [0.0] * stages
    s = 0
    while any(at < 2 * parts for at in places):
        s = (s + 1) % stages
        while places[s] < 2 * parts:
            kind, part = orders[s][places[s]]
            sender = s - 1 if kind == FORWARD else s + 1
            begin = free[s]
            if 0 <= sender < stages:
                if (kind, sender, part) not in done:
                    break
                begin = max(begin, done[kind, sender, part]) + hops[min(s, sender)]
            begins[s] = begin
            free[s] = done[kind, s, part] = begin + (forward if kind == FORWARD else backward)[s]
            places[s] += 1
    return Walk(tuple(free), tuple(begins))


def peak_of(counts: StageCounts, order: Sequence[Step], parts: int) -> int:
    """Return the peak memory of a stage in bytes."""
    flying = ended = most = 0
    for kind, _ in order:
        flying += kind == FORWARD
        most = max(most, counts.peaks[kind] + (flying - 1) * counts.held + ended * counts.kept)
        if kind == BACKWARD:
            flying, ended = flying - 1, ended + 1
    if counts.peaks[SUMS]:
        most = max(most, counts.peaks[SUMS] + (parts - 1) * counts.kept)
    return max(most, counts.peaks[UPDATE]) + parts * counts.buffers
