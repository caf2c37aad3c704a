"""Counts of a step with many equal pieces, and of deep models by shallow ones.

[Note: Extrapolation]
Every block, and every micro-batch, adds the same events. Two counts, one piece apart, show which, and where. Others
stay, or grow linearly; so does memory, if places count from either end. The added piece is taken second and last but
one, because FSDP gathers one unit ahead. The peak of an update may become too large, never too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache

from dpshard.applications.planner.counts import Bytes, Counts
from dpshard.applications.planner.models import PRESETS, Transformer
from dpshard.applications.planner.simulation import Clipping, Setup, Simulation
from dpshard.applications.planner.timeline import Event

Key = tuple[object, ...]
Span = tuple[int, int]

FEW = 4
"""Both ends, and two with equals at both sides."""
MANY = 12


class Extrapolation:
    """A rank with `pieces` blocks more than `few`."""

    def __init__(self, few: Simulation, more: Simulation, pieces: int, whole: Callable[[], Simulation]) -> None:
        self._few, self._more, self._pieces, self._whole = few, more, pieces, cache(whole)
        self.elements = few.elements + pieces * (more.elements - few.elements)
        self.shard_elements = few.shard_elements + pieces * (more.shard_elements - few.shard_elements)
        self.positions = few.positions

    def count(self, clipping: Clipping | None, micro_batch: int) -> Counts:
        """See Simulation."""
        few, more = (rank.count(clipping, micro_batch) for rank in (self._few, self._more))
        found = extrapolated(few, more, self._pieces)
        return self._whole().count(clipping, micro_batch) if found is None else found


def rank_of(setup: Setup) -> Simulation | Extrapolation:
    """Return a rank of `setup`, within `fake_ranks`."""
    shape = setup.model if isinstance(setup.model, Transformer) else PRESETS.get(setup.model)
    # DDP's buckets ignore the borders of blocks.
    if shape is None or shape.layers <= MANY or setup.shard == "ddp":
        return Simulation(setup)
    few, more = (Simulation(replace(setup, model=replace(shape, layers=n))) for n in (FEW, FEW + 1))
    return Extrapolation(few, more, shape.layers - FEW, lambda: Simulation(setup))


def extrapolated(few: Counts, more: Counts, pieces: int) -> Counts | None:
    """Return counts with `pieces` pieces more than `few`; None if `more` has other changes."""
    known, keys = _keys(few.events, more.events)
    added = [
        (j, end)
        for kind, _, _, j, end in SequenceMatcher(None, known, keys, autojunk=False).get_opcodes()
        if kind == "insert"
    ]
    if [key for at, key in enumerate(keys) if not any(j <= at < end for j, end in added)] != known:
        return None
    events: list[Event] = []
    peaks: list[Bytes] = []
    ends: list[Bytes] = []
    for last in (False, True):
        events, ends = [], []
        for a, b, span in _pairs(_slid(added, keys, last=last), len(keys)):
            if span is not None:
                copies = slice(*span)
                events += list(more.events[copies]) * pieces
                ends += list(more.ends[copies]) * pieces
            events.append(_event(few.events[a], more.events[b], pieces))
            ends.append(_line(few.ends[a], more.ends[b], pieces))
            # The stretch before the added piece has the same neighbours as one between copies.
            before = b if span is None or last else span[0]
            peaks.append(_line(few.peaks[a], more.peaks[before], pieces))
    return Counts(tuple(events), tuple(peaks), tuple(ends))


def _keys(few: Sequence[Event], more: Sequence[Event]) -> tuple[list[Key], list[Key]]:
    both = {_sized(event) for event in few} & {_sized(event) for event in more}

    def key(event: Event) -> Key:
        return sized if (sized := _sized(event)) in both else (event.phase, event.kind, event.dtype)

    return [key(event) for event in few], [key(event) for event in more]


def _sized(event: Event) -> Key:
    return event.phase, event.kind, event.dtype, event.nbytes, event.ranks, event.flops


def _slid(added: list[Span], keys: list[Key], *, last: bool) -> list[Span]:
    moved = []
    for at, (j, end) in enumerate(added):
        least = added[at - 1][1] if at else 0
        most = added[at + 1][0] if at + 1 < len(added) else len(keys)
        size, first, final = end - j, j, j
        while first > least and keys[first - 1] == keys[first - 1 + size]:
            first -= 1
        while final + size < most and keys[final] == keys[final + size]:
            final += 1
        begin = max(final - size, first) if last else min(first + size, final)
        moved.append((begin, begin + size))
    return moved


def _pairs(added: list[Span], size: int) -> Iterator[tuple[int, int, Span | None]]:
    a = 0
    starts = dict(added)
    b = 0
    while b < size:
        span = (b, starts[b]) if b in starts else None
        b = b if span is None else span[1]
        if b < size:
            yield a, b, span
        a, b = a + 1, b + 1


def _event(few: Event, more: Event, pieces: int) -> Event:
    flops, nbytes = _line((few.flops, few.nbytes), (more.flops, more.nbytes), pieces)
    return replace(few, flops=flops, nbytes=nbytes)


def _line(few: Bytes, more: Bytes, pieces: int) -> Bytes:
    return tuple(a + pieces * (b - a) for a, b in zip(few, more, strict=True))
