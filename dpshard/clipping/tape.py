"""The tape: how per-sample records become norms, clip coefficients and clipped sums within one backward pass.

A tape holds the records of one set of samples. All forwards of one micro-batch of `engine.batches` share a tape, so
that a sample has one gradient and one coefficient however often the model was called. The anchor of a group is made at
the group's first use: autograd runs younger nodes first, so a group closes, and frees its records, as soon as it is
done. See [Note: Anchor, slot, tap] in autograd_nodes.py.

With two passes the second one knows all coefficients, so that no parameter waits for another: each has an anchor of
its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import Anchor, Arrive, Slot, in_full_precision, tap
from dpshard.clipping.checkpointing import KeptOutputs, unseen
from dpshard.clipping.forwards import HALFWAY, Forwards
from dpshard.clipping.functions import ClippingFunction, ClippingGroup
from dpshard.clipping.group_tape import GroupTape, Roots, Use
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.records import Record
from dpshard.records.host import all_finite, elementwise
from dpshard.rules.call import Source
from dpshard.rules.derived import pull_back_per_sample

__all__ = ["ClippedSums", "Clipper", "Pass", "Roots", "Sink", "Take", "Tape", "Use"]

Take = Callable[[str], Tensor | None]
"""Computes the clipped sum of a parameter by name, once, and frees its records; None if no gradient arrived."""


class Pass(Enum):
    """The purpose of a backward pass through a tape."""

    BOOK_KEEPING = auto()  # one pass: records are kept until their group closes
    NORMS = auto()  # first of two: records are measured and dropped
    SUMS = auto()  # second of two: coefficients are known, records are summed at once


class Tape:
    """The records of one set of B samples, by clipping group."""

    compiled: bool = False
    rehearses: bool = False

    def __init__(self, clipper: Clipper, batch_size: int, is_padding_B: Tensor | None, loss_scale: float) -> None:
        self.clipper = clipper
        self.batch_size = batch_size
        self.is_padding_B = is_padding_B
        self.loss_scale = loss_scale
        """What recorded gradients are multiplied by to be those of each sample's own loss (B under a mean)."""
        self.scale_B = loss_scale if is_padding_B is None else (~is_padding_B).float() * loss_scale
        """`loss_scale`, and 0 for rows of padding. A product is safe, because clip coefficients are finite."""
        self.current = Pass.BOOK_KEEPING
        self.aborted = False
        self.forwards = Forwards()
        self.kept_outputs = KeptOutputs()
        self._epoch = clipper.epoch
        self.groups: dict[int, GroupTape] = {}
        self._closed: set[int] = set()  # numbers of the anchors that have taken their sums
        self._tokens: dict[int, Tensor] = {}

    @property
    def gap(self) -> str | None:
        """Why the samples do not count whole; None if every forward had a complete backward."""
        return HALFWAY if self.aborted else self.forwards.gap(alone=self.is_padding_B is None)

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; in backward `keep` and its gradient arrive on this tape as the records of `use`."""
        tokens, arrive = self.expect(use)
        return tap(output, keep, tokens, arrive)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor per template, equal to it, whose gradients arrive here as the records of `use`.

        A template that is not floating point (token ids) gets a slot of float64, which holds integers exactly.
        """
        return self.region([(use, templates)])[0]

    def region(self, asked: Sequence[tuple[Use, tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
        """Return the slots of all uses of a compiled region, given with their templates: one node for all."""
        if not asked:
            return []
        tokens, arrivals = zip(*[self.expect(use) for use, _ in asked], strict=True)
        distinct = {id(token): token for some in tokens for token in some}
        sizes = [len(templates) for _, templates in asked]

        def arrive(gradients: Sequence[Tensor | None]) -> None:
            parts = iter(gradients)
            for arrival, tensors in reversed([(a, [*islice(parts, n)]) for a, n in zip(arrivals, sizes, strict=True)]):
                arrival(tensors)

        made = iter(Slot.apply(arrive, sum(sizes), *(x for _, some in asked for x in some), *distinct.values()))
        return [tuple(islice(made, n)) for n in sizes]

    def expect(self, use: Use) -> tuple[list[Tensor], Arrive]:
        """Expect the records of `use`: return the tokens of the anchors that wait for them, and their receiver."""
        if self.clipper.execution.backward_passes == 2:
            self.kept_outputs.note()
        tokens = []
        for anchor in self.clipper.anchors_of(use.sources):
            self._tokens[anchor] = self.clipper.token(anchor)
            tokens.append(self._tokens[anchor])
        for source in use.sources:
            for name in source.roots:
                self._begun_group(name).expect(name)
        forward = self.forwards.use()
        return tokens, functools.partial(self._arrive_from, forward, use)

    def tokens(self) -> list[Tensor]:
        """Return the anchors' tokens that the uses of this tape hang on; another backward may have retired them."""
        return list(self._tokens.values())

    def idle(self) -> list[Tensor]:
        """Return the tokens of the anchors that no use of this tape hangs on, in groups that have other uses.

        DDP's reducer waits for the gradients of these parameters, too.
        """
        names = [name for index in self.groups for name in self.clipper.groups[index].names]
        anchors = self.clipper.anchors_of([self.clipper.sources[name] for name in names])
        tokens = [self.clipper.token(anchor) for anchor in anchors if anchor not in self._tokens]
        return [token for token in tokens if token.requires_grad]

    def _arrive_from(self, forward: int, use: Use, tensors: Sequence[Tensor | None]) -> None:
        self._require_open(use)
        if self.current is not Pass.NORMS:
            self.forwards.reach(forward, trained=True)
        self.arrive(use, tensors)

    def _require_open(self, use: Use) -> None:
        """Raise LogicalBatchError if records would come too late, or a second time."""
        if self._epoch != self.clipper.epoch:
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} after the logical batch of its samples was released or left: "
                f"they would count in another one. Call backward within the loop over micro-batches."
            )
        if self.aborted or (self._closed and not self._closed.isdisjoint(self.clipper.anchors_of(use.sources))):
            raise LogicalBatchError(
                f"Backward reached {use.sources[0].label} again after the samples of this micro-batch were clipped: "
                f"a sample would count twice. Call backward once per micro-batch, on the sum of all its losses."
            )

    def arrive(self, use: Use, tensors: Sequence[Tensor | None]) -> None:
        """Take the gradients of a slot; autograd calls this once per use and pass."""
        for anchor in self.clipper.anchors_of(use.sources):
            self.clipper.pending.setdefault(anchor, {})[id(self)] = self
        if all(tensor is not None for tensor in tensors):
            for source, record in use.build(*tensors):
                self._add(source, record.real())
        arriving = {name for source in use.sources for name in source.roots}
        for source in use.sources:
            for name in source.roots:
                group = self._group(name)
                complete = group.arrive(name, source)
                if self.current is Pass.SUMS:
                    group.sum(name)
                elif complete:
                    keep = self.current is Pass.BOOK_KEEPING
                    group.measure(name, keep=keep, closing=group.awaits_only(arriving))

    def _add(self, source: Source, record: Record) -> None:
        """Take a record of a source as records of the parameters that it comes from."""
        if source.isometric:
            name = source.roots[0]
            self._group(name).add(name, source, record)
            return
        for name, root in pull_back_per_sample(source, record, self.clipper.roots.values).items():
            self._group(name).add(name, self.clipper.sources[name], root)

    def _group(self, name: str) -> GroupTape:
        return self.groups[self.clipper.group_of[name].index]

    def _begun_group(self, name: str) -> GroupTape:
        clipper = self.clipper
        index = clipper.group_of[name].index
        if index not in self.groups:
            self.groups[index] = GroupTape(clipper.roots, clipper.sources, clipper.execution, self.loss_scale)
        return self.groups[index]

    def _clip(self, group: ClippingGroup) -> None:
        """Compute the clip coefficients of a group from the norms that have arrived."""
        tape = self.groups[group.index]
        norm_B = tape.norm_B(keep=self.current is Pass.BOOK_KEEPING)
        if norm_B is None:
            return
        factor_B = self.clipper.function.factor(norm_B, group.threshold)
        clip_coef_B = elementwise(lambda _, factor_B, scale_B: factor_B * scale_B, factor_B, self.scale_B)
        # To ask an accelerator whether all are finite would be to wait for it: there the mask is used, empty or not.
        nonfinite_B = None if all_finite(norm_B) else ~(norm_B < torch.inf)
        tape.clip(clip_coef_B, nonfinite_B)
        self.clipper.sink.observe(group, norm_B, self.is_padding_B)

    def between_passes(self) -> None:
        """End the pass that took the norms; the next one sums."""
        for index, group in self.groups.items():
            self._clip(self.clipper.groups[index])
            group.begin_sums()
        self.current = Pass.SUMS

    def close(self, anchor: int) -> None:
        """Fix the coefficients; from now on `take` returns the sums of this anchor, and further records are refused."""
        if self.current is Pass.BOOK_KEEPING:  # each group has one anchor, of the same number
            self._clip(self.clipper.groups[anchor])
        self._closed.add(anchor)

    def take(self, name: str) -> Tensor | None:
        """Return the clipped sum of one parameter, once, and free its records; None if no gradient has arrived."""
        return self._group(name).take(name)


@dataclass(frozen=True, slots=True)
class ClippedSums:
    """The clipped sums of the parameters of one anchor, over all samples of a backward pass."""

    names: Sequence[str]
    tapes: Sequence[Tape]

    def take(self, name: str) -> Tensor | None:
        """Compute the clipped sum of a parameter, once, and free its records; None if no gradient has arrived."""
        total: Tensor | None = None
        for tape in self.tapes:
            part = tape.take(name)
            total = part if total is None else total if part is None else total + part
        return total


class Sink(Protocol):
    """Receives the results of a backward pass."""

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the norms [B] of a group on one tape, when they are complete."""
        ...

    def deliver(self, sums: ClippedSums) -> Sequence[Tensor | None]:
        """Return the gradients that the anchor of these sums returns, one per parameter."""
        ...


class Clipper:
    """The clipping of one model: its groups, their anchors, and the tapes that wait for them."""

    def __init__(
        self,
        roots: Roots,
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        sink: Sink,
    ) -> None:
        self.roots = roots
        self.groups = groups
        """With the thresholds of the logical batch in progress."""
        self.group_of = {name: group for group in groups for name in group.names}
        self.anchors = [group.names for group in groups]
        """The parameters whose sums an anchor delivers: in one pass they become known a group at a time."""
        if execution.backward_passes == 2:
            self.anchors = [(name,) for name in self.group_of]
        self._anchor_of = {name: i for i, names in enumerate(self.anchors) for name in names}
        self.sources = {name: roots.source(name) for name in roots.shapes}
        self.function = function
        self.execution = execution
        self.sink = sink
        self.pending: dict[int, dict[int, Tape]] = {}
        """By anchor: the tapes that have records for it."""
        self.epoch = 0
        """A tape of an earlier epoch takes no more records: its samples would count in another release."""
        self._tokens: dict[int, Tensor] = {}

    def twin(self, sink: Sink) -> Clipper:
        """Return a clipper of the same groups, in one pass, for a comparison beside the training."""
        execution = replace(self.execution, backward_passes=1)
        return Clipper(self.roots, self.groups, self.function, execution, sink)

    def with_values(self, values: dict[str, Tensor]) -> Clipper:
        """Return a clipper of the same groups for other values of the parameters."""
        roots = replace(self.roots, anchored=values, values=values)
        return Clipper(roots, self.groups, self.function, self.execution, self.sink)

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Set the thresholds, one a group; between logical batches, so that a sum has one sensitivity."""
        self.groups = tuple(replace(g, threshold=t) for g, t in zip(self.groups, thresholds, strict=True))
        self.group_of = {name: group for group in self.groups for name in group.names}

    def differentiated(self) -> list[Tensor]:
        """Return what the anchors that are open now differentiate."""
        anchored = [self.roots.anchored[name] for anchor in self._tokens for name in self.anchors[anchor]]
        return [x for x in anchored if x.requires_grad]

    def anchors_of(self, sources: Sequence[Source]) -> list[int]:
        """Return the numbers of the anchors that deliver the roots of `sources`, each once, in order."""
        return sorted({self._anchor_of[name] for source in sources for name in source.roots})

    def token(self, anchor: int) -> Tensor:
        """Return the output of an anchor; one serves all forwards up to its next backward."""
        if anchor not in self._tokens:
            with torch.enable_grad(), unseen():
                parameters = [self.roots.anchored[name] for name in self.anchors[anchor]]
                self._tokens[anchor] = Anchor.apply(functools.partial(self.close, anchor), *parameters)
        return self._tokens[anchor]

    def close(self, anchor: int) -> Sequence[Tensor | None]:
        """Close an anchor on every tape that has records for it, and deliver their sums; the anchor calls this."""
        names = self.anchors[anchor]
        self._tokens.pop(anchor, None)
        tapes = list(self.pending.pop(anchor, {}).values())
        with in_full_precision(self.roots.values[names[0]].device):
            for tape in tapes:
                tape.close(anchor)
            return self.sink.deliver(ClippedSums(names, tapes))

    def abort(self) -> None:
        """Drop the records that an unfinished backward pass has left."""
        for tapes in self.pending.values():
            for tape in tapes.values():
                tape.aborted = True
        self.pending.clear()
        self._tokens.clear()
