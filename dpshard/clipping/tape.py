"""The tape: turns per-sample records into norms, clip coefficients and clipped sums within one backward pass.

All forwards of a micro-batch of `engine.batches` share a tape, so a sample has one gradient and one coefficient however
often the model is called. A group's first use makes its anchor. Autograd runs younger nodes first, so groups close, and
free their records, early. See [Note: Anchor, slot, tap] in autograd_nodes.py. With two passes each parameter has its
own anchor, because the second pass has all coefficients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import Anchor, Arrive, Slot, in_full_precision, tap
from dpshard.clipping.checkpointing import KeptOutputs, unseen
from dpshard.clipping.closing import ClippedSums, Measured, Pass, clip, squared_norms
from dpshard.clipping.functions import ClippingFunction
from dpshard.clipping.group_tape import GroupTape, Roots
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.owed_backwards import HALFWAY, OwedBackwards
from dpshard.clipping.region import RegionPlan, Row, plan_region
from dpshard.clipping.stacks import FEWEST, Stack, Stacks, recipe_to_join
from dpshard.clipping.uses import Use
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.records import Offload, Owners, PerSampleGrad, Record
from dpshard.rules.call import Source
from dpshard.rules.derived import pull_back_per_sample

__all__ = ["ClippedSums", "Clipper", "Pass", "Roots", "Sink", "Take", "Tape", "Use"]

Take = Callable[[str], Tensor | None]
"""See ClippedSums.take."""


class Tape:
    """The records of one set of B samples, by clipping group."""

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
        """Take B = `batch_size` samples; with `owners`, as many rows of packed samples, each of one owner."""
        self.clipper = clipper
        self.batch_size = batch_size
        """Samples that rules record: B, or the rows of packed samples."""
        self.owners = owners
        self.is_padding_B = is_padding_B
        self.loss_scale = loss_scale
        """Factor from recorded gradients to those of each sample's own loss (B under a mean)."""
        self.scale_B = loss_scale if is_padding_B is None else (~is_padding_B).float() * loss_scale
        """`loss_scale`, and 0 for padding. Multiplying is safe because clip coefficients are finite."""
        self.current = Pass.BOOK_KEEPING
        self.aborted = False
        self.forwards = OwedBackwards()
        self.kept_outputs = KeptOutputs()
        self._epoch = clipper.epoch
        self.groups: dict[int, GroupTape] = {}
        self._closed: set[int] = set()  # closed anchors
        self._stacks: dict[int, Stacks] = {}  # uses that wait for others, by anchor
        self._sums: dict[str, Tensor] = {}  # clipped sums of such uses
        self._spanning: dict[int, Measured] = {}  # groups that wait for norms of other ranks
        self._tokens: dict[int, Tensor] = {}

    @property
    def unfinished(self) -> str | None:
        """Reason why the samples do not count whole; None if every forward had a complete backward."""
        return HALFWAY if self.aborted else self.forwards.unfinished(inputs_suffice=self.is_padding_B is None)

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; in backward `keep` and its gradient arrive here as the records of `use`."""
        tokens, arrive = self.expect(use)
        return tap(output, keep, tokens, arrive)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor equal to each template; their gradients arrive here as the records of `use`.

        Templates of integers (token ids) get a float64 slot, which holds them exactly.
        """
        return self.region([Row((use,), templates)])[0]

    def region(self, rows: Sequence[Row]) -> list[tuple[Tensor, ...]]:
        """Return the slots of the uses of a compiled region, by row, from one node."""
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
        made = Slot.apply(arrive, len(templates), *templates, *[self._tokens[anchor] for anchor in plan.anchors])
        return [made[place] for place in plan.places]

    def _region_arrives(self, forward: int, plan: RegionPlan, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of a region's slots, those of its last row first."""
        self._begin_arrival(forward, plan.rows[-1].uses[-1], plan.anchors)
        for row, place in zip(reversed(plan.rows), reversed(plan.places), strict=True):
            tensors = gradients[place]
            there = [x for x in tensors if x is not None]
            if len(there) == len(tensors) and self._joins_others(row.uses, there):
                continue
            for use, *parts in zip(row.uses, *map(row.cut, tensors), strict=True):
                self.arrive(use, parts)

    def expect(self, use: Use) -> tuple[list[Tensor], Arrive]:
        """Expect the records of `use`; return the tokens of its anchors, and a receiver for the records."""
        if self.clipper.execution.backward_passes == 2:
            self.kept_outputs.note()
        tokens, anchors = [], self.clipper.anchors_of(use.sources)
        for anchor in anchors:
            self._tokens[anchor] = self.clipper.token(anchor)
            tokens.append(self._tokens[anchor])
        for source in use.sources:
            for name in source.roots:
                index = self.clipper.group_of[name].index
                (self.groups.get(index) or self._begun(index)).expect((name,))
        forward = self.forwards.use()
        return tokens, functools.partial(self._arrive_from, forward, use, anchors)

    def tokens(self) -> list[Tensor]:
        """Return the tokens of this tape's uses, which the clipper may have dropped after another backward."""
        return list(self._tokens.values())

    def unused_anchor_tokens(self) -> list[Tensor]:
        """Return the tokens of unused anchors in used groups, because DDP's reducer waits for their gradients."""
        names = [name for index in self.groups for name in self.clipper.groups[index].names]
        anchors = self.clipper.anchors_of([self.clipper.sources[name] for name in names])
        tokens = [self.clipper.token(anchor) for anchor in anchors if anchor not in self._tokens]
        return [token for token in tokens if token.requires_grad]

    def _arrive_from(self, forward: int, use: Use, anchors: list[int], tensors: Sequence[Tensor | None]) -> None:
        """Receive a use; autograd calls this once per use and pass."""
        self._begin_arrival(forward, use, anchors)
        self.arrive(use, tensors)

    def _begin_arrival(self, forward: int, use: Use, anchors: list[int]) -> None:
        self._require_open(use, anchors)
        if self.current is not Pass.NORMS:
            self.forwards.reach(forward, trained=True)
        for anchor in anchors:
            self.clipper.pending.setdefault(anchor, {})[id(self)] = self

    def _require_open(self, use: Use, anchors: list[int]) -> None:
        """Raise LogicalBatchError unless records come in time, and once."""
        if self._epoch != self.clipper.epoch:
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} after the logical batch of its samples was released or left: "
                f"they would count in another one. Call backward within the loop over micro-batches."
            )
        if self.aborted or (self._closed and not self._closed.isdisjoint(anchors)):
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} again after the samples of this micro-batch were clipped: "
                f"a sample would count twice. Call backward once per micro-batch, on the sum of all its losses."
            )

    def arrive(self, use: Use, tensors: Sequence[Tensor | None]) -> None:
        """Take the tensors kept for a use, and its gradient, as records."""
        there = [x for x in tensors if x is not None]
        if len(there) == len(tensors):
            if self._joins_others((use,), there):
                return
            for source, record in use.records(there):
                owned = record if self.owners is None else self.owners.assign(record)
                self._add(source, self._summed(use, owned.real()))
        arriving = [name for source in use.sources for name in source.roots]
        for source in use.sources:
            for name in source.roots:
                group = self._group(name)
                complete = group.arrive(name, source)
                if self.current is Pass.SUMS:
                    group.sum(name)
                elif complete:
                    keep = self.current is Pass.BOOK_KEEPING
                    group.measure(name, keep=keep, closing=group.awaits_only(arriving))

    def _joins_others(self, uses: Sequence[Use], tensors: Sequence[Tensor]) -> bool:
        """Return True if uses wait for ones with equal recipes; see [Note: Uses with equal recipes].

        `tensors`: of one use, or of a row of uses.
        """
        clipper = self.clipper
        if self.owners is not None or self.current is not Pass.BOOK_KEEPING or not clipper.joining:
            return False
        anchors = clipper.anchors_of([source for use in uses for source in use.sources])
        if len(anchors) > 1 or anchors[0] not in clipper.joining:
            return False
        recipe = recipe_to_join(uses[0], tensors, clipper.sources, len(uses))
        if recipe is None:
            return False
        names = [source.label for use in uses for source in use.sources]
        if not all(self._group(name).is_only_use(name) for name in names):
            return False
        (anchor,) = anchors
        if anchor not in self._stacks:
            self._stacks[anchor] = Stacks(clipper.group_of)
        self._stacks[anchor].add(uses, recipe, tensors)
        for name in names:
            self._group(name).arrive_first(name)
        return True

    def _add(self, source: Source, record: Record) -> None:
        """Add a record of a source as records of its root parameters."""
        if source.isometric:
            name = source.roots[0]
            self._group(name).add(name, source, record)
            return
        for name, root in pull_back_per_sample(source, record, self.clipper.roots.values).items():
            self._group(name).add(name, self.clipper.sources[name], root)

    def _summed(self, use: Use, record: Record) -> Record:
        """Return the record with the terms of other ranks; see [Note: Norms of parts]."""
        parts = self.clipper.roots.parts
        return PerSampleGrad(parts.summed(record.per_sample())) if use.termwise and parts is not None else record

    def _group(self, name: str) -> GroupTape:
        return self.groups[self.clipper.group_of[name].index]

    def _begun(self, index: int) -> GroupTape:
        if index not in self.groups:
            clipper = self.clipper
            self.groups[index] = GroupTape(clipper.roots, clipper.sources, clipper.execution, clipper.offload)
        return self.groups[index]

    def _measure(self, indices: Sequence[int], stacks: Sequence[Stack]) -> Measured | None:
        """Measure groups and their stacks; None without any gradient."""
        clipper, keep = self.clipper, self.current is Pass.BOOK_KEEPING
        parts, scale_B = clipper.roots.parts, self.scale_B
        if parts is not None:
            for index in indices:
                parts.meet(index)
            scale_B = parts.gather_samples(scale_B) if isinstance(scale_B, Tensor) else scale_B
        squares = {m: self.groups[index].norm_sq(keep=keep) for m, index in enumerate(indices)}
        own = {m: norm_sq_B for m, norm_sq_B in squares.items() if norm_sq_B is not None}
        place = {index: m for m, index in enumerate(indices)}
        rows = [[place[index] for index in stack.groups] for stack in stacks]
        stacked = [*zip(rows, [stack.measured(clipper.execution) for stack in stacks], strict=True)]
        norm_sq_MB = squared_norms(len(indices), own, stacked)
        return None if norm_sq_MB is None else Measured(indices, [*own], stacks, rows, norm_sq_MB, scale_B)

    def _clip(self, measured: Measured) -> None:
        """Fix the clip coefficients of groups, and sum their stacks."""
        clipper, indices, own = self.clipper, measured.indices, measured.own
        thresholds = [clipper.groups[index].threshold for index in indices]
        scales = {"loss_scale": self.loss_scale, "scale_B": measured.scale_B}
        clipped = clip(measured.norm_sq_MB, thresholds, clipper.function, **scales)
        for m in own:
            nonfinite_MB = clipped.nonfinite_MB
            self.groups[indices[m]].clip(clipped.sum_weight_MB[m], None if nonfinite_MB is None else nonfinite_MB[m])
        for stack, some in zip(measured.stacks, measured.rows, strict=True):
            self._sums.update(clipped.sums(stack, some))
        norms = clipped.norm_MB.unbind()
        parts = clipper.roots.parts
        for m in sorted({*own, *(m for some in measured.rows for m in some)}):
            norm_B = norms[m] if parts is None else parts.select_own(norms[m])
            clipper.sink.observe(clipper.groups[indices[m]], norm_B, self.is_padding_B)

    def _stacks_of(self, anchor: int) -> list[Stack]:
        """Return the records of the uses that waited for an anchor; a use that met few others goes to its group."""
        stacks = self._stacks.pop(anchor, None)
        if stacks is None:
            return []
        for use, tensors in stacks.alone():
            for source, record in use.records(tensors):
                group = self._group(source.label)
                group.add(source.label, source, record)
                group.measure(source.label, keep=True, closing=True)
        return stacks.made

    def own_norm_sq_B(self, index: int) -> Tensor | None:
        """Return this rank's part [B] of the squared norms of a spanning group; None if it has none."""
        return self._spanning[index].norm_sq_MB[0] if index in self._spanning else None

    def clip_spanning(self, index: int, norm_sq_B: Tensor) -> None:
        """Fix the coefficients of a spanning group, given its squared norms on all ranks, so that `take` works."""
        self._clip(replace(self._spanning.pop(index), norm_sq_MB=norm_sq_B[None]))

    def expire(self) -> None:
        """Refuse records that have not arrived yet."""
        self._epoch = -1

    def between_passes(self) -> None:
        """End the pass for norms and begin the one for sums."""
        for index, group in self.groups.items():
            measured = self._measure([index], [])
            if measured is not None:
                self._clip(measured)
            group.begin_sums()
        self.current = Pass.SUMS

    def close(self, anchor: int) -> None:
        """Fix the coefficients, so that `take` works; refuse further records."""
        if self.current is Pass.BOOK_KEEPING:
            stacks = self._stacks_of(anchor)
            measured = self._measure([i for i in self.clipper.groups_of(anchor) if i in self.groups], stacks)
            if measured is not None and anchor in self.clipper.spanning:  # then each group has its own anchor
                self._spanning[anchor] = measured
                measured.copy_records(self.groups)
            elif measured is not None:
                self._clip(measured)
        self._closed.add(anchor)

    def take(self, name: str) -> Tensor | None:
        """See ClippedSums.take."""
        return self._sums.pop(name) if name in self._sums else self._group(name).take(name)


class Sink(Protocol):
    """Receives the results of a backward pass."""

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the complete norms [B] of a group on one tape."""
        ...

    def deliver(self, sums: ClippedSums) -> Sequence[Tensor | None]:
        """Return the gradients of the anchor of these sums, one per parameter."""
        ...


class Clipper:
    """The clipping of one model: its groups, their anchors, and the tapes with records for them."""

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
        """Make the anchors; `at_once`: the records of all groups arrive together, so one anchor closes all."""
        self.roots = roots
        self.spanning = spanning
        """Numbers of the groups with parameters on other ranks: after backward, their owner calls `clip_spanning`."""
        self.groups = groups
        """Groups with the thresholds of the logical batch in progress."""
        self.group_of = {name: group for group in groups for name in group.names}
        self.anchors = [group.names for group in groups]
        """Parameters by anchor: a group each in one pass, or all groups `at_once`; one parameter each in two."""
        if execution.backward_passes == 2:
            self.anchors = [(name,) for name in self.group_of]
        elif at_once:
            self.anchors = [tuple(self.group_of)]
        self._anchor_of = {name: i for i, names in enumerate(self.anchors) for name in names}
        self.sources = {name: roots.source(name) for name in roots.shapes}
        self.function = function
        self.execution = execution
        joins = roots.parts is None and execution.records_on_device is None
        self.joining = {i for i, names in enumerate(self.anchors) if joins and len(names) >= FEWEST}
        """Anchors for which small uses may wait for others; see [Note: Uses with equal recipes]."""
        self.sink = sink
        keep = execution.records_on_device
        self.offload = None if keep is None else Offload(keep)
        self.pending: dict[int, dict[int, Tape]] = {}
        """Tapes with records, by anchor."""
        self._plans: dict[Use, RegionPlan] = {}  # by the first use of a region
        self.epoch = 0
        """Tapes of earlier epochs take no records, which would count in another release."""
        self._tokens: dict[int, Tensor] = {}

    def twin(self, sink: Sink) -> Clipper:
        """Return a clipper of the same groups, in one pass, for a comparison outside training."""
        execution = replace(self.execution, backward_passes=1)
        return Clipper(self.roots, self.groups, self.function, execution, sink)

    def with_values(self, values: dict[str, Tensor]) -> Clipper:
        """Return a clipper of the same groups for other parameter values."""
        roots = replace(self.roots, anchored=values, values=values)
        return Clipper(roots, self.groups, self.function, self.execution, self.sink)

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Set the thresholds, one per group; only between logical batches, so that a sum has one sensitivity."""
        self.groups = tuple(replace(g, threshold=t) for g, t in zip(self.groups, thresholds, strict=True))
        self.group_of = {name: group for group in self.groups for name in group.names}

    def differentiated(self) -> list[Tensor]:
        """Return the tensors that the open anchors differentiate."""
        anchored = [self.roots.anchored[name] for anchor in self._tokens for name in self.anchors[anchor]]
        return [x for x in anchored if x.requires_grad]

    def anchors_of(self, sources: Sequence[Source]) -> list[int]:
        """Return the sorted numbers of the anchors for the roots of `sources`."""
        if len(self.anchors) == 1:
            return [0]
        return sorted({self._anchor_of[name] for source in sources for name in source.roots})

    def groups_of(self, anchor: int) -> list[int]:
        """Return the numbers of the groups with parameters of an anchor."""
        return [*dict.fromkeys(self.group_of[name].index for name in self.anchors[anchor])]

    def plan_of(self, rows: Sequence[Row]) -> RegionPlan:
        """Return the plan of a region; regions ask for the same uses in each call."""
        first = rows[0].uses[0]
        plan = self._plans.get(first)
        if plan is None or not plan.fits(rows):
            plan = plan_region(rows, self._anchor_of, {name: group.index for name, group in self.group_of.items()})
            if len(rows) > 1:  # a single use may be of one forward only
                self._plans[first] = plan
        return plan

    def token(self, anchor: int) -> Tensor:
        """Return the output of an anchor; all forwards up to its next backward share it."""
        if anchor not in self._tokens:
            with torch.enable_grad(), unseen():
                parameters = [self.roots.anchored[name] for name in self.anchors[anchor]]
                self._tokens[anchor] = Anchor.apply(functools.partial(self.close, anchor), *parameters)
        return self._tokens[anchor]

    def close(self, anchor: int, handed_out: bool) -> Sequence[Tensor | None]:
        """Close an anchor on every tape with records for it, and deliver their sums; the anchor calls this."""
        names = self.anchors[anchor]
        self._tokens.pop(anchor, None)
        tapes = list(self.pending.pop(anchor, {}).values())
        with in_full_precision(self.roots.values[names[0]].device):
            for tape in tapes:
                tape.close(anchor)
            ready = () if anchor in self.spanning else tapes
            return self.sink.deliver(ClippedSums(names, ready, handed_out))

    def abort(self) -> None:
        """Drop the records of an unfinished backward pass."""
        for tapes in self.pending.values():
            for tape in tapes.values():
                tape.aborted = True
        self.pending.clear()
        self._tokens.clear()
