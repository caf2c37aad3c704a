"""Small uses of parameters that are recorded together.

[Note: Uses with equal makers] A small use waits until its group closes. Then uses with equal makers and sizes are
joined. A write to their tensors in the meantime raises, because it changes the gradient. The bound would hold: norm and
sum use the same values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.uses import Use
from dpshard.config import Execution
from dpshard.records import OuterProduct, OwnMemory, PerSampleGrad, Stacked, small_bytes
from dpshard.records.written import changed_in_backward
from dpshard.rules.call import RecordMaker, Source

FEWEST = 4

_NBYTES, _VERSION = attrgetter("nbytes"), attrgetter("_version")  # a comprehension would be a call for each use

_TOGETHER = 2**5
"""Most bytes of joined uses, as a multiple of the largest small use's; it bounds copies."""


@dataclass(slots=True)
class _Row:
    uses: Sequence[Use]
    tensors: Sequence[Tensor]
    nbytes: int
    version: int
    """Sum of the tensors' versions at arrival."""

    def cut(self, dim: int) -> Sequence[_Row]:
        """Return a row for each use."""
        self.refuse_written()
        parts = zip(*[x.chunk(len(self.uses), dim) for x in self.tensors], strict=True)
        return [_row([use], part) for use, part in zip(self.uses, parts, strict=True)]

    def refuse_written(self) -> None:
        if sum(map(_VERSION, self.tensors)) != self.version:
            raise changed_in_backward(self.uses[0].sources[0].label, measured=False)


def _row(uses: Sequence[Use], tensors: Sequence[Tensor]) -> _Row:
    return _Row(uses, tensors, sum(map(_NBYTES, tensors)), sum(map(_VERSION, tensors)))


@dataclass(slots=True)
class Stack:
    """The joined records of uses with equal makers."""

    names: list[str]
    stacked: Stacked
    groups: list[int]

    def measured(self, execution: Execution) -> Tensor:
        """Squared norms [n, B]."""
        norm_sq_nB, self.stacked = self.stacked.measured(execution.norm, keep=execution.keep_per_sample)
        return norm_sq_nB

    def copy_records(self, memory: OwnMemory) -> None:
        """Copy the records."""
        self.stacked = replace(self.stacked, record=memory.of(self.stacked.record))

    def clipped_sums(self, sum_weight_nB: Tensor, nonfinite_nB: Tensor | None) -> dict[str, Tensor]:
        """Clipped sums by name."""
        finite = self.stacked if nonfinite_nB is None else self.stacked.without(nonfinite_nB)
        return dict(zip(self.names, finite.clipped_sums(sum_weight_nB), strict=True))


class Stacks:
    """Uses that wait for one anchor."""

    def __init__(self, group_of: Mapping[str, ClippingGroup]) -> None:
        self._group_of = group_of
        self._waiting: dict[Any, tuple[RecordMaker, list[_Row]]] = {}
        self._groups: set[int] = set()
        self.nbytes = 0
        """Bytes of all uses that wait."""

    def add(self, uses: Sequence[Use], maker: RecordMaker, tensors: Sequence[Tensor], groups: Collection[int]) -> None:
        """Take uses of `groups`, with joined tensors."""
        n = len(uses)
        key = (maker, *[(x.shape if n == 1 else _of_one(x, maker.axis.dim, n), x.dtype, x.device) for x in tensors])
        row = _row(uses, tensors)
        self._waiting.setdefault(key, (maker, []))[1].append(row)
        self._groups.update(groups)
        self.nbytes += row.nbytes

    def take(self, groups: Collection[int] | None = None) -> tuple[list[Stack], list[tuple[Use, Sequence[Tensor]]]]:
        """Remove the uses of `groups` (None: all); return stacks of them, and the uses in no stack."""
        stacks: list[Stack] = []
        alone: list[_Row] = []
        if groups is not None and self._groups.isdisjoint(groups):
            return [], []
        waiting, self._waiting, self.nbytes = self._waiting, {}, 0
        for key, (maker, rows) in waiting.items():
            ready, apart = (rows, []) if groups is None else self._divide(rows, groups, maker.axis.dim)
            if ready is not rows and rows:
                self._waiting[key] = maker, rows
                self.nbytes += sum([row.nbytes for row in rows])
            if len(ready) >= FEWEST or any(len(row.uses) > 1 for row in ready):
                stacks += self._stacked(maker, ready)
            alone += apart + ready
        for row in alone:
            row.refuse_written()
        self._groups = self._groups.difference(groups) if groups is not None else set()
        return stacks, [(row.uses[0], row.tensors) for row in alone]

    def _divide(self, rows: list[_Row], groups: Collection[int], dim: int) -> tuple[list[_Row], list[_Row]]:
        """Take from `rows` those with all parameters in `groups`, and those with some; return both."""
        inside: list[_Row] = []
        across: list[_Row] = []
        outside: list[_Row] = []
        lists = {frozenset({True}): inside, frozenset({True, False}): across, frozenset({False}): outside}
        for row in rows:
            found = self._inside(row, groups)
            several = len(found) > 1 and len(row.uses) > 1
            for part in row.cut(dim) if several else [row]:
                lists[self._inside(part, groups) if several else found].append(part)
        rows[:] = outside
        return inside, across

    def _inside(self, row: _Row, groups: Collection[int]) -> frozenset[bool]:
        return frozenset(self._group_of[source.label].index in groups for use in row.uses for source in use.sources)

    def _stacked(self, maker: RecordMaker, rows: list[_Row]) -> Iterator[Stack]:
        most = _TOGETHER * small_bytes(rows[0].tensors[0].device)
        while rows:
            batch, nbytes = [rows.pop()], 0
            while rows and (nbytes := nbytes + batch[-1].nbytes) + rows[-1].nbytes <= most:
                batch.append(rows.pop())
            yield from self._made(maker, batch)

    def _made(self, maker: RecordMaker, rows: Sequence[_Row]) -> Iterator[Stack]:
        for row in rows:
            row.refuse_written()
        uses = [use for row in rows for use in row.uses]
        joined = replace(maker, batch_size=len(uses) * maker.batch_size)
        tensors = rows[0].tensors
        if len(rows) > 1:
            tensors = [torch.cat(parts, maker.axis.dim) for parts in zip(*[row.tensors for row in rows], strict=True)]
        for i, record in enumerate(joined(*tensors)):
            assert isinstance(record, PerSampleGrad | OuterProduct)
            names = [use.sources[i].label for use in uses]
            yield Stack(names, Stacked(record, len(uses)), [self._group_of[name].index for name in names])


def _of_one(x: Tensor, dim: int, uses: int) -> torch.Size:
    shape = list(x.shape)
    shape[dim] //= uses
    return torch.Size(shape)


def maker_to_join(
    use: Use, tensors: Sequence[Tensor], roots: Mapping[str, Source], uses: int = 1
) -> RecordMaker | None:
    """Return the maker of a use that can be recorded with others, else None.

    `tensors`: those of `uses` joined uses. `roots`: the parameters as sources.
    """
    maker = use.build
    if not isinstance(maker, RecordMaker) or maker.axis.adjacent or maker.axis.routed:
        return None
    nbytes = 0
    for x in tensors:
        if type(x) is not Tensor or x.is_complex():
            return None
        nbytes += x.nbytes // uses
    for source in use.sources:
        if roots.get(source.label) is not source:
            return None  # a tensor derived from parameters
        nbytes += 4 * math.prod(source.shape)
    return maker if nbytes <= small_bytes(tensors[0].device) else None
