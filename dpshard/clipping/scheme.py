"""How one model is clipped: its groups, thresholds and anchors.

[Note: Shared anchors] An anchor costs hundreds of Python calls. So consecutive groups share one, up to `WAITING` bytes
of clipped sums. On a GPU complete groups wait for each other up to `COMPLETE` bytes of records, to share kernel
launches. Groups keep their own anchors in three cases. Ranks that hold parts of a model must meet in each group, in one
order. Offloaded records are fetched group by group. Sums of a group that spans pipeline stages wait for norms of other
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dpshard.clipping.coefficients import ClippedSums
from dpshard.clipping.functions import ClippingFunction
from dpshard.clipping.group_tape import Roots
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.stacks import FEWEST
from dpshard.config import Execution
from dpshard.records import accum_dtype
from dpshard.rules.call import Source

WAITING = {"cpu": 2**25, "cuda": 2**27}
"""Bytes of clipped sums, and of small records, that may wait."""

COMPLETE = {"cpu": 0, "cuda": 2**27}
"""Bytes of complete groups' records that may wait."""


class Sink(Protocol):
    """Receives the results of a backward pass."""

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take a group's norms [B] on one tape."""
        ...

    def deliver(self, sums: ClippedSums) -> Sequence[Tensor | None]:
        """Take an anchor's clipped sums; return one gradient per parameter for autograd."""
        ...


class Scheme:
    """Clipping groups of one model, and their anchors."""

    def __init__(
        self,
        roots: Roots,
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        sink: Sink,
        *,
        at_once: bool = False,
        spanning: frozenset[int] = frozenset(),
    ) -> None:
        """Choose the anchors: only one if all records arrive `at_once`."""
        self.roots, self.function, self.execution, self.sink = roots, function, execution, sink
        self.spanning = spanning
        """Groups with parameters on other ranks; their owner calls `clip_spanning`."""
        self.groups = groups
        """Groups with the thresholds of the logical batch in progress."""
        kind = next((x.device.type for x in roots.values.values()), "cpu")
        self.waiting, self.complete = (most.get(kind, most["cpu"]) for most in (WAITING, COMPLETE))
        self.group_of = {name: group for group in groups for name in group.names}
        self.sources = {name: roots.source(name) for name in roots.shapes}
        self.anchors = [tuple(names) for names in self._anchors(at_once=at_once)]
        self._anchor_of = {name: i for i, names in enumerate(self.anchors) for name in names}
        joins = roots.parts is None and execution.records_on_device is None
        self.joining = {i for i, names in enumerate(self.anchors) if joins and len(names) >= FEWEST}
        """Anchors whose small uses may wait."""
        self.groups_at = [[*dict.fromkeys(self.group_of[name].index for name in names)] for names in self.anchors]
        several = [] if at_once else [(i, indices) for i, indices in enumerate(self.groups_at) if len(indices) > 1]
        self.shared = {index: i for i, indices in several for index in indices}
        """Anchors of the groups that may close before their anchor."""
        self.withheld = {i for i, indices in enumerate(self.groups_at) if not spanning.isdisjoint(indices)}
        devices = {i: roots.values[self.anchors[i][0]].device for i, _ in several}
        self.gpus = {i: device for i, device in devices.items() if device.type == "cuda"}

    def _anchors(self, *, at_once: bool) -> Iterator[Sequence[str]]:
        if self.execution.backward_passes == 2:
            yield from ((name,) for name in self.group_of)
        elif at_once:
            yield [*self.group_of]
        elif self.roots.parts is not None or self.execution.records_on_device is not None:
            yield from (group.names for group in self.groups)
        else:
            yield from self._shared()

    def _shared(self) -> Iterator[Sequence[str]]:
        names: list[str] = []
        nbytes, devices = 0, set[torch.device]()
        for group in self.groups:
            own = sum(self._sum_bytes(name) for name in group.names)
            where = {self.roots.values[name].device for name in group.names}
            alone = group.index in self.spanning or len(where) > 1
            if names and (alone or nbytes + own > self.waiting or where != devices):
                yield names
                names, nbytes = [], 0
            names, nbytes, devices = [*names, *group.names], nbytes + own, where
            if alone:
                nbytes = self.waiting + 1
        if names:
            yield names

    def _sum_bytes(self, name: str) -> int:
        return math.prod(self.roots.shapes[name]) * accum_dtype(self.roots.values[name]).itemsize

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Set one threshold per group, between logical batches, because a sum has one sensitivity."""
        self.groups = tuple(replace(g, threshold=t) for g, t in zip(self.groups, thresholds, strict=True))
        self.group_of = {name: group for group in self.groups for name in group.names}

    def anchors_of(self, sources: Sequence[Source]) -> list[int]:
        """Sorted anchors of `sources`."""
        if len(self.anchors) == 1:
            return [0]
        return sorted({self._anchor_of[name] for source in sources for name in source.roots})
