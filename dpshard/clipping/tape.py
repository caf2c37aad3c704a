"""The tape: from per-sample records to clipped sums, within one backward pass.

All forwards of a micro-batch share a tape: a sample has one gradient and one coefficient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import Arrive, apply_anchor, apply_slot, in_full_precision, tap
from dpshard.clipping.checkpointing import KeptOutputs, unseen
from dpshard.clipping.closer import Closer
from dpshard.clipping.coefficients import ClippedSums, Pass
from dpshard.clipping.functions import ClippingFunction
from dpshard.clipping.group_tape import GroupTape, Roots
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.owed_backwards import HALFWAY, OwedBackwards
from dpshard.clipping.region import RegionPlan, Row, plan_region
from dpshard.clipping.scheme import Scheme, Sink
from dpshard.clipping.uses import Use
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.records import Offload, Owners, PerSampleGrad, Record
from dpshard.rules.call import Source
from dpshard.rules.derived import pull_back_per_sample

__all__ = ["ClippedSums", "Clipper", "Pass", "Roots", "Sink", "Take", "Tape", "Use"]

Take = Callable[[str], Tensor | None]
"""From a parameter's name to its clipped sum, which it returns once."""


class Tape:
    """The records of B samples."""

    compiled: bool = False
    rehearses: bool = False

    def __init__(
        self,
        clipper: Clipper,
        batch_size: int,
        is_padding_B: Tensor | None,
        loss_scale: float,
        owners: Owners | None = None,
    ) -> None:
        """Take `batch_size` samples, or rows whose samples `owners` gives."""
        self.clipper = clipper
        self.batch_size = batch_size
        self.owners = owners
        self.is_padding_B = is_padding_B
        self.loss_scale = loss_scale
        """Factor from recorded gradients to those of each sample's own loss."""
        self.closer = Closer(clipper, is_padding_B, loss_scale)
        self.current = Pass.BOOK_KEEPING
        self.aborted = False
        self.forwards = OwedBackwards()
        self.kept_outputs = KeptOutputs()
        self._epoch = clipper.epoch
        self.groups, self.take = self.closer.groups, self.closer.take
        self._tokens: dict[int, Tensor] = {}

    @property
    def unfinished(self) -> str | None:
        """Reason why the micro-batch is incomplete, or None."""
        return HALFWAY if self.aborted else self.forwards.unfinished(inputs_suffice=self.is_padding_B is None)

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; in backward, `keep` and its gradient arrive as records."""
        tokens, arrive = self.expect(use)
        return tap(output, keep, tokens, arrive)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return a view of each template; in backward, the views' gradients arrive as records."""
        return self.region([Row((use,), templates)])[0]

    def region(self, rows: Sequence[Row]) -> list[tuple[Tensor, ...]]:
        """Return the dummies of a compiled region's uses, by row."""
        if not rows:
            return []
        plan = self.clipper.plan_of(rows)
        for anchor in plan.anchors:
            self._tokens[anchor] = self.clipper.token(anchor)
        if self.clipper.execution.backward_passes == 2:
            self.kept_outputs.note()
        for index, names in plan.names.items():
            self._begun(index).expect(names)
        arrive = functools.partial(self._region_arrives, self.forwards.use(), plan)
        templates = [x for row in rows for x in row.templates]
        made = apply_slot(arrive, len(templates), *templates, *[self._tokens[anchor] for anchor in plan.anchors])
        return [made[place] for place in plan.places]

    def _region_arrives(self, forward: int, plan: RegionPlan, gradients: Sequence[Tensor | None]) -> None:
        self._begin_arrival(forward, plan.rows[-1].uses[-1], plan.anchors, plan.names)
        for row, place in zip(reversed(plan.rows), reversed(plan.places), strict=True):
            tensors = gradients[place]
            there = [x for x in tensors if x is not None]
            if len(there) == len(tensors) and self._joins_others(row.uses, there):
                continue
            for use, *parts in zip(row.uses, *map(row.cut, tensors), strict=True):
                self.arrive(use, parts)

    def expect(self, use: Use) -> tuple[list[Tensor], Arrive]:
        """Expect records of `use`; return its tokens, and the function that receives the records."""
        if self.clipper.execution.backward_passes == 2:
            self.kept_outputs.note()
        tokens, anchors = [], self.clipper.anchors_of(use.sources)
        for anchor in anchors:
            token = self.clipper.tokens.get(anchor)
            self._tokens[anchor] = token = self.clipper.token(anchor) if token is None else token
            tokens.append(token)
        indices: dict[int, None] = {}
        for source in use.sources:
            for name in source.roots:
                index = self.clipper.group_of[name].index
                (self.groups.get(index) or self._begun(index)).expect((name,))
                indices[index] = None
        forward = self.forwards.use()
        return tokens, functools.partial(self._arrive_from, forward, use, anchors, indices)

    def tokens(self) -> list[Tensor]:
        """Tokens of this tape's uses."""
        return list(self._tokens.values())

    def unused_anchor_tokens(self) -> list[Tensor]:
        """Tokens of unused anchors in used groups: DDP's reducer waits for their gradients."""
        names = [name for index in self.groups for name in self.clipper.groups[index].names]
        anchors = self.clipper.anchors_of([self.clipper.sources[name] for name in names])
        tokens = [self.clipper.token(anchor) for anchor in anchors if anchor not in self._tokens]
        return [token for token in tokens if token.requires_grad]

    def _arrive_from(
        self, forward: int, use: Use, anchors: list[int], indices: Collection[int], tensors: Sequence[Tensor | None]
    ) -> None:
        self._begin_arrival(forward, use, anchors, indices)
        self.arrive(use, tensors)

    def _begin_arrival(self, forward: int, use: Use, anchors: list[int], indices: Collection[int]) -> None:
        self._require_open(use, indices)
        if self.current is not Pass.NORMS:
            self.forwards.reach(forward, trained=True)
        for anchor in anchors:
            self.clipper.pending.setdefault(anchor, {})[id(self)] = self
        if self.clipper.gpus:
            self.closer.note_streams(anchors)

    def _require_open(self, use: Use, indices: Collection[int]) -> None:
        if self._epoch != self.clipper.epoch:
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} after the logical batch of its samples was released or left: "
                f"they would count in another one. Call backward within the loop over micro-batches."
            )
        if self.aborted or (self.closer.closed and not self.closer.closed.isdisjoint(indices)):
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} again after the samples of this micro-batch were clipped: "
                f"a sample would count twice. Call backward once per micro-batch, on the sum of all its losses."
            )

    def arrive(self, use: Use, tensors: Sequence[Tensor | None]) -> None:
        """Take the kept tensors of a use, and its gradient."""
        there = [x for x in tensors if x is not None]
        if len(there) == len(tensors):
            if self._joins_others((use,), there):
                return
            for source, record in use.records(there):
                owned = record if self.owners is None else self.owners.assign(record)
                self._add(source, self._summed(use, owned.real()))
        reached = [(self.closer.group(name), name, source) for source in use.sources for name in source.roots]
        complete = [(group, name) for group, name, source in reached if group.arrive(name, source)]
        if self.current is Pass.SUMS:
            for group, name, _ in reached:
                group.sum(name)
            return
        keep = self.current is Pass.BOOK_KEEPING
        for group, name in complete:
            group.measure(name, keep=keep, closing=group.missing == 0)
        if keep:
            self.closer.close_complete([name for _, name in complete])

    def _joins_others(self, uses: Sequence[Use], tensors: Sequence[Tensor]) -> bool:
        if self.owners is not None or self.current is not Pass.BOOK_KEEPING:
            return False
        return self.closer.joins_others(uses, tensors)

    def _add(self, source: Source, record: Record) -> None:
        if source.isometric:
            name = source.roots[0]
            self.closer.group(name).add(name, source, record)
            return
        for name, root in pull_back_per_sample(source, record, self.clipper.roots.values).items():
            self.closer.group(name).add(name, self.clipper.sources[name], root)

    def _summed(self, use: Use, record: Record) -> Record:
        parts = self.clipper.roots.parts
        return PerSampleGrad(parts.summed(record.per_sample())) if use.termwise and parts is not None else record

    def _begun(self, index: int) -> GroupTape:
        if index not in self.groups:
            clipper = self.clipper
            self.groups[index] = GroupTape(clipper.roots, clipper.sources, clipper.execution, clipper.offload)
        return self.groups[index]

    def expire(self) -> None:
        """Refuse all records that arrive from now on."""
        self._epoch = -1

    def between_passes(self) -> None:
        """Begin the second pass."""
        self.closer.end_norms()
        self.current = Pass.SUMS

    def close(self, anchor: int) -> None:
        """Fix the coefficients; `_require_open` then refuses a second backward."""
        if self.current is Pass.BOOK_KEEPING:
            self.closer.close(anchor)


class Clipper(Scheme):
    """The scheme of one model, with its tapes."""

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
        super().__init__(roots, groups, function, execution, sink, at_once=at_once, spanning=spanning)
        keep = execution.records_on_device
        self.offload = None if keep is None else Offload(keep)
        self.pending: dict[int, dict[int, Tape]] = {}
        """Tapes with records, by anchor."""
        self._plans: dict[Use, RegionPlan] = {}  # by a region's first use
        self.epoch = 0
        """Tapes of earlier epochs take no records: they would count in another release."""
        self.tokens: dict[int, Tensor] = {}
        """Outputs of the anchors used since their last backward."""

    def twin(self, sink: Sink) -> Clipper:
        """Return a clipper of the same groups with one backward pass."""
        execution = replace(self.execution, backward_passes=1)
        return Clipper(self.roots, self.groups, self.function, execution, sink)

    def with_values(self, values: dict[str, Tensor]) -> Clipper:
        """Return a clipper for other parameter values."""
        roots = replace(self.roots, anchored=values, values=values)
        return Clipper(roots, self.groups, self.function, self.execution, self.sink)

    def differentiated(self) -> list[Tensor]:
        """Tensors that the open anchors differentiate."""
        anchored = [self.roots.anchored[name] for anchor in self.tokens for name in self.anchors[anchor]]
        return [x for x in anchored if x.requires_grad]

    def plan_of(self, rows: Sequence[Row]) -> RegionPlan:
        """Return the plan of a region, kept from an earlier call if the rows are the same."""
        first = rows[0].uses[0]
        plan = self._plans.get(first)
        if plan is None or not plan.fits(rows):
            plan = plan_region(rows, self._anchor_of, {name: group.index for name, group in self.group_of.items()})
            if len(rows) > 1:  # a single use may belong to only one forward
                self._plans[first] = plan
        return plan

    def token(self, anchor: int) -> Tensor:
        """Return an anchor's output, until its next backward."""
        if anchor not in self.tokens:
            with torch.enable_grad(), unseen():
                parameters = [self.roots.anchored[name] for name in self.anchors[anchor]]
                self.tokens[anchor] = apply_anchor(functools.partial(self.close, anchor), *parameters)
        return self.tokens[anchor]

    def close(self, anchor: int, reached: Sequence[bool] | None) -> Sequence[Tensor | None]:
        """Close an anchor on every tape, and deliver their sums."""
        names = self.anchors[anchor]
        self.tokens.pop(anchor, None)
        tapes = list(self.pending.pop(anchor, {}).values())
        with in_full_precision(self.roots.values[names[0]].device):
            for tape in tapes:
                tape.close(anchor)
            ready = () if anchor in self.withheld else tapes
            return self.sink.deliver(ClippedSums.to(names, ready, reached))

    def abort(self) -> None:
        """Drop an unfinished backward pass."""
        for tapes in self.pending.values():
            for tape in tapes.values():
                tape.aborted = True
        self.pending.clear()
        self.tokens.clear()
