"""The norms and clipped sums of one clipping group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.clipping.parts import Parts
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.records import (
    Bundle,
    Offload,
    OwnMemory,
    PerSampleGrad,
    Record,
    Small,
    Waiting,
    accum_dtype,
    as_complex,
    bundles,
    is_small,
    measure,
    pays_to_join,
)
from dpshard.records.host import total
from dpshard.records.written import changed_in_backward, nbytes_of, versions
from dpshard.rules.call import Source
from dpshard.rules.derived import pull_back, pull_back_per_sample


@dataclass(frozen=True)
class Roots:
    """The trainable parameters, by name."""

    shapes: Mapping[str, Sequence[int]]
    """Shapes in forward: of whole parameters, or of this rank's parts."""
    anchored: Mapping[str, Tensor]
    """Tensors that the anchors differentiate: parameters, or stand-ins for sharded ones."""
    values: Mapping[str, Tensor]
    """Values in forward. Sharded ones are whole only while unsharded."""
    parts: Parts | None = None

    def source(self, name: str) -> Source:
        """Return a parameter as a source."""
        shape = tuple(self.shapes[name])
        return Source(name, name, (name,), shape, lambda values: values[name], isometric=True, exact=True)

    def placeholder(self, name: str) -> dict[str, Tensor]:
        """Return an empty tensor of a parameter's shape: FSDP may have freed the value."""
        value = self.values[name]
        return {name: torch.empty(tuple(self.shapes[name]), dtype=accum_dtype(value), device=value.device)}


def _is_same(source: Source, other: Source) -> bool:
    return other is source or (other.exact and other.label == source.label)


class GroupTape:
    """The records of one group on one tape."""

    def __init__(
        self,
        roots: Roots,
        sources: Mapping[str, Source],
        execution: Execution,
        offload: Offload | None = None,
    ) -> None:
        self.roots, self.sources, self.execution = roots, sources, execution
        self._offload = offload
        self.entries: dict[str, list[tuple[Source, Record]]] = {}
        """Not summed yet, by parameter."""
        self._versions: dict[str, list[int]] = {}  # of records that wait: foreign code may write to them
        self._waiting: dict[str, list[tuple[Source, Waiting]]] = {}  # measured records, perhaps offloaded
        self.small: dict[str, Small] = {}
        """Small records, one per parameter, that are joined when the group closes."""
        self.sum_weight_B: Tensor | None = None
        """Factors [B] of recorded gradients; None until the norms are complete."""
        self._expected: dict[str, int] = {}  # uses, by parameter
        self._arrived: dict[str, int] = {}  # uses with gradients
        self.missing = 0
        """Uses without a gradient yet."""
        self._norm_sq: list[Tensor] = []  # of measured parameters
        self._whole_sq: list[Tensor] = []  # of parameters that all ranks hold whole
        self._nonfinite_B: Tensor | None = None  # samples without a finite norm
        self._bundles: list[Bundle] = []
        self._sums: dict[str, Tensor] = {}
        self._sums_are_slices = True  # for parameters whose records are terms of a sum

    # --- uses

    def expect(self, names: Iterable[str]) -> None:
        """Count a use of each parameter."""
        for name in names:
            self._expected[name] = self._expected.get(name, 0) + 1
            self.missing += 1

    def are_only_uses(self, names: Iterable[str]) -> bool:
        """Return True if each parameter has a single use, whose gradient has not arrived."""
        return {*map(self._expected.get, names)} == {1} and self._arrived.keys().isdisjoint(names)

    def arrive_first(self, names: Sequence[str]) -> None:
        """Count the arrival of each parameter's only gradient."""
        self._arrived.update(dict.fromkeys(names, 1))
        self.missing -= len(names)

    @property
    def has_arrived(self) -> bool:
        """True if the gradient of any use has arrived."""
        return bool(self._arrived)

    @property
    def nbytes(self) -> int:
        """Bytes of the records on their device."""
        entries = (record for some in self.entries.values() for _, record in some)
        return sum(map(nbytes_of, (*entries, *self.small.values())))

    def add(self, name: str, source: Source, record: Record) -> None:
        """Take a record of a parameter."""
        self.entries.setdefault(name, []).append((source, record))

    def arrive(self, name: str, source: Source) -> bool:
        """Count the arrival of a use's gradients; return True for the last use."""
        arrived = self._arrived[name] = self._arrived.get(name, 0) + 1
        if arrived > self._expected[name]:
            raise LogicalBatchError(
                f"Backward reached {source.label} twice before the samples of this micro-batch were clipped: a "
                f"sample would count twice. Call backward once per micro-batch, on the sum of all its losses."
            )
        self.missing -= 1
        return arrived == self._expected[name]

    # --- norms

    def measure(self, name: str, *, keep: bool, closing: bool) -> None:
        """Measure a parameter's records. If `keep`, keep them; they may be offloaded unless `closing`."""
        entries = self.entries.pop(name, [])
        if not entries:
            return
        if self._has_terms(name):
            entries = [(self.sources[name], self._slice(name, entries))]
        source = entries[0][0]
        if len(entries) > 1 and not all(_is_same(source, other) for other, _ in entries):
            entries, source = self._at_root(name, entries), self.sources[name]
        first, *others = [record for _, record in entries]
        offload = None if closing else self._offload
        waits = isinstance(first, PerSampleGrad) or (keep and (offload is None or offload.bundles_small()))
        if is_small(first) and waits and not others and source.label == name:
            self.small[name] = first
            self._versions[name] = [versions(first)]
            return
        records = self._measured(name, [first, *others], closing=closing)
        if keep:
            if offload is None:
                self.entries[name] = [(source, record) for record in records]
                self._versions[name] = [versions(record) for record in records]
            else:
                self._waiting[name] = [(source, offload.wait(name, record)) for record in records]

    def _measured(self, name: str, records: Sequence[Record], *, closing: bool) -> list[Record]:
        execution = self.execution
        norm_sq_B, kept = measure(records, execution.norm, keep=execution.keep_per_sample, closing=closing)
        if self._is_cut(name):
            self._norm_sq.append(norm_sq_B)
        else:
            self._whole_sq.append(norm_sq_B if self.roots.parts is None else self.roots.parts.pad_to_all(norm_sq_B))
        return kept

    def _is_cut(self, name: str) -> bool:
        parts = self.roots.parts
        return parts is None or parts.adds_squares(name)

    def _has_terms(self, name: str) -> bool:
        parts = self.roots.parts
        return parts is not None and parts.is_termwise(name)

    def _slice(self, name: str, entries: list[tuple[Source, Record]]) -> Record:
        """Return this rank's slice of the sum of terms; all ranks must call it."""
        assert self.roots.parts is not None
        first, *others = (record.per_sample() for _, record in self._at_root(name, entries))
        return PerSampleGrad(self.roots.parts.sliced(name, sum(others, first)))

    def squares(self, *, keep: bool) -> list[Tensor]:
        """Measure the remaining records; return squared norms [B] whose sum is the group's."""
        for name in [name for name, n in self._expected.items() if self._arrived.get(name, 0) < n]:
            self.measure(name, keep=keep, closing=True)  # some branch had no backward
        small, self.small = self.small, {}
        for name, record in small.items():
            self._require_unwritten(name, [record], measured=False)
        if self.roots.parts is None:
            self._measure_small(small, keep=keep)
        else:
            for cut in (True, False):
                self._measure_small({name: r for name, r in small.items() if self._is_cut(name) == cut}, keep=keep)
            self._complete(self.roots.parts)
        return self._norm_sq

    def _measure_small(self, small: dict[str, Small], *, keep: bool) -> None:
        if not pays_to_join(small):
            for alone, record in small.items():
                kept = self._measured(alone, [record], closing=True)
                if keep:
                    self.entries[alone] = [(self.sources[alone], kept[0])]
            return
        for bundle in bundles(small):
            kept = self._measured(next(iter(bundle.shapes)), [bundle.record], closing=True)
            if keep:
                self._bundles.append(replace(bundle, record=kept[0]))

    def _complete(self, parts: Parts) -> None:
        """Combine the squared norms of all ranks, which must call it in one order of groups."""
        cut, whole = self._norm_sq, self._whole_sq
        if cut or whole:
            none_B = torch.zeros_like((cut or whole)[0])
            self._norm_sq = [parts.norm_sq(total(cut) if cut else none_B, total(whole) if whole else none_B)]
            self._whole_sq = []

    def _require_unwritten(self, name: str, records: Iterable[Record], *, measured: bool = True) -> None:
        before = self._versions.pop(name, None)
        if before is not None and before != [versions(record) for record in records]:
            raise changed_in_backward(name, measured=measured)

    def copy_records(self, memory: OwnMemory) -> None:
        """Copy the measured records."""
        for name, some in self.entries.items():
            self._require_unwritten(name, [record for _, record in some])
        self.entries = {name: [(s, memory.of(r)) for s, r in some] for name, some in self.entries.items()}
        self._waiting = {name: [(s, w.copied(memory)) for s, w in some] for name, some in self._waiting.items()}
        self._bundles = [replace(bundle, record=memory.of(bundle.record)) for bundle in self._bundles]

    def clip(self, sum_weight_B: Tensor, nonfinite_B: Tensor | None) -> None:
        """Set factors of recorded gradients, and samples without a finite norm."""
        self.sum_weight_B, self._nonfinite_B = sum_weight_B, nonfinite_B
        if self._offload is not None:
            self._offload.expect([waiting for entries in self._waiting.values() for _, waiting in entries])

    def begin_sums(self) -> None:
        """Begin the second of two passes."""
        self._bundles.clear()
        self._arrived.clear()
        self.missing = sum(self._expected.values())
        self._sums_are_slices = False

    def _at_root(self, name: str, entries: list[tuple[Source, Record]]) -> list[tuple[Source, Record]]:
        shaped = self.roots.placeholder(name)
        return [
            (
                self.sources[name],
                record if source.label == name else pull_back_per_sample(source, record, shaped)[name],
            )
            for source, record in entries
        ]

    # --- sums

    def _weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        weight_B, nonfinite_B, parts = self.sum_weight_B, self._nonfinite_B, self.roots.parts
        assert weight_B is not None
        if parts is None or self._is_cut(name):
            return weight_B, nonfinite_B
        return parts.select_own(weight_B), None if nonfinite_B is None else parts.select_own(nonfinite_B)

    def sum(self, name: str) -> None:
        """Sum a parameter's records, and drop them."""
        entries, waiting = self.entries.pop(name, []), self._waiting.pop(name, [])
        if self.sum_weight_B is None:
            return
        weight_B, nonfinite_B = self._weights(name)
        self._require_unwritten(name, [record for _, record in entries])
        for source, record in entries:
            self._add_sum(name, source, record, weight_B, nonfinite_B)
        while waiting and self._offload is not None:
            source, away = waiting.pop(0)  # its memory is free after its sum
            record, differs = self._offload.fetch(away)
            dead_B, own_B = nonfinite_B, weight_B
            if differs is not None:  # these are not the bits whose norms were measured
                dead_B = differs.expand_as(weight_B) if dead_B is None else dead_B | differs
                own_B = weight_B.masked_fill(dead_B, 0)
            self._add_sum(name, source, record, own_B, dead_B)

    def sum_all(self) -> None:
        """Sum all records, and drop them."""
        for name in [*self.entries]:
            self.sum(name)
        self._sum_bundles()

    def _add_sum(self, name: str, source: Source, record: Record, weight_B: Tensor, dead_B: Tensor | None) -> None:
        part = (record if dead_B is None else record.without(dead_B)).clipped_sum(weight_B)
        if source.label != name:
            part = pull_back(source, part, self.roots.placeholder(name))[name]
        self._sums[name] = self._sums[name] + part if name in self._sums else part

    def take(self, name: str) -> Tensor | None:
        """Return the clipped sum of a parameter, once; only this rank's slice if its records are terms."""
        if name in self.entries or name in self._waiting:
            self.sum(name)
        self._sum_bundles()
        clipped = self._sums.pop(name, None)
        if clipped is not None and self._has_terms(name):
            assert self.roots.parts is not None
            return clipped if self._sums_are_slices else self.roots.parts.sliced(name, clipped[None])[0]
        return None if clipped is None else as_complex(clipped, self.roots.anchored[name].dtype)

    def _sum_bundles(self) -> None:
        some, self._bundles = self._bundles, []
        if self.sum_weight_B is None:
            return
        for bundle in some:
            sum_weight_B, nonfinite_B = self._weights(next(iter(bundle.shapes)))
            finite = bundle if nonfinite_B is None else bundle.without(nonfinite_B)
            self._sums.update(finite.clipped_sums(sum_weight_B))
