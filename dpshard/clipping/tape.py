"""The tape: how per-sample records become norms, factors and clipped sums within one backward pass.

A tape holds the records of one set of samples. All forwards of one micro-batch of `engine.batches` share a tape, so
that a sample has one gradient and one factor however often the model was called. The anchor of a group is made at the
group's first use: autograd runs younger nodes first, so a group closes, and frees its records, as soon as it is done.
See [Note: Anchor, slot, tap] in nodes.py.

Of two passes the second knows all factors, so that no parameter waits for another: each has an anchor of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import Anchor, Arrive, Slot, in_full_precision, tap
from dpshard.clipping.functions import ClippingFunction, ClippingGroup
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.records import FusedGrads, PerSampleGrad, Record, accum_dtype, as_complex, fetched, measure, offloaded
from dpshard.rules.call import Build, Source
from dpshard.rules.derived import pull_back, pull_back_per_sample


class Pass(Enum):
    """What a backward pass through a tape is for."""

    BOOK_KEEPING = auto()  # one pass: records are kept until their group closes
    NORMS = auto()  # first of two: records are measured and dropped
    SUMS = auto()  # second of two: factors are known, records are summed at once


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One use of sources by one call: how the tensors that arrive at its slot become records."""

    sources: tuple[Source, ...]
    build: Build
    copies: bool = False
    """Whether the template of its slot holds the values of its source, one copy a sample, rather than zeros."""


@dataclass(slots=True)
class GroupTape:
    """What one clipping group has recorded for the samples of one tape."""

    expected: dict[str, int] = field(default_factory=dict)  # uses of a parameter that were made in forward
    arrived: dict[str, int] = field(default_factory=dict)  # and those whose gradients have come
    entries: dict[str, list[tuple[Source, Record]]] = field(default_factory=dict)
    norm_sq_B: Tensor | None = None
    clip_coef_B: Tensor | None = None
    """What a sample's recorded gradient is multiplied by in the clipped sum, once the norms are known."""
    nonfinite_B: Tensor | None = None
    """Whether a sample's norm is not finite; None if it is known that all are."""
    small: dict[str, PerSampleGrad] = field(default_factory=dict)
    """Of parameters of which all uses have arrived: they are measured and summed together when the group closes."""
    bundle: FusedGrads | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)

    def awaits_only(self, names: set[str]) -> bool:
        """Whether every use of other parameters has arrived."""
        return all(self.arrived.get(name, 0) == n for name, n in self.expected.items() if name not in names)

    def add(self, norm_sq_B: Tensor) -> None:
        """Add the squared norms of some parameters."""
        self.norm_sq_B = norm_sq_B if self.norm_sq_B is None else self.norm_sq_B + norm_sq_B


HALFWAY = "its backward failed half-way"


class Forwards:
    """The forwards on the samples of one tape, and whether a backward has differentiated each to its end."""

    def __init__(self) -> None:
        self.count = 0
        self._owed: set[int] = set()  # numbers of those that no backward has differentiated
        self._used: set[int] = set()  # of those that used a trainable parameter
        self._trained: set[int] = set()  # of those whose records a backward has brought
        self._reached: dict[int, bool] = {}  # by the backward in progress: whether with records
        self._backward = -1  # its number

    def begin(self) -> None:
        """Count a forward, to which a backward is owed."""
        self.count += 1
        self._owed.add(self.count)

    def use(self) -> int:
        """Note that the latest forward uses a trainable parameter. Returns its number."""
        self._used.add(self.count)
        return self.count

    def end(self, outputs: Iterable[Any]) -> None:
        """Called when the latest forward has returned. One that used no trainable parameter is owed nothing."""
        if self.count not in self._used:
            self._owed.discard(self.count)
            return
        # What asks for the gradients of inputs only (adversarial examples) brings no records.
        passes = functools.partial(self._pass, self.count)
        for x in outputs:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(passes)

    def _pass(self, forward: int, _: Tensor) -> None:
        self.reach(forward, trained=False)

    def reach(self, forward: int, *, trained: bool) -> None:
        """Note that the backward in progress differentiates a forward; `trained`: with respect to parameters."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            self._reached.clear()
            # Of a backward that raises, autograd drops the callbacks.
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
        self._reached[forward] = self._reached.get(forward, False) or trained

    def _complete(self) -> None:
        self._owed.difference_update(self._reached)
        self._trained.update(forward for forward, trained in self._reached.items() if trained)
        self._reached.clear()

    @property
    def untrained(self) -> bool:
        """Whether parameters were used, and no backward has brought their records to its end."""
        return not self._trained and bool(self._owed or self._used)

    def gap(self, *, alone: bool) -> str | None:
        """Why the samples do not count whole; None if they do. `alone`: whether no forward may stand for another."""
        if any(self._reached.values()):
            return HALFWAY
        if len(self._owed) == self.count > 0:
            return "its forward had no backward"
        if self._owed:
            return f"{len(self._owed)} of its {self.count} forwards had no backward"
        if self.untrained and not alone:
            return "only gradients of its inputs were taken"
        return None


class Tape:
    """Records, norms and factors of one set of B samples."""

    compiled: bool = False
    rehearses: bool = False

    def __init__(self, clipper: Clipper, batch_size: int, is_padding_B: Tensor | None, loss_scale: float) -> None:
        self.clipper = clipper
        self.batch_size = batch_size
        self.is_padding_B = is_padding_B
        self.loss_scale = loss_scale
        """What recorded gradients are multiplied by to be those of each sample's own loss (B under a mean)."""
        self.scale_B = loss_scale if is_padding_B is None else (~is_padding_B).float() * loss_scale
        """The same, or 0 for rows of padding. A product with the factors will do, for these are finite."""
        self.current = Pass.BOOK_KEEPING
        self.aborted = False
        self.forwards = Forwards()
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
        """One tensor per template, equal to it, whose gradients arrive on this tape as the records of `use`.

        A template that is not floating point (token ids) gets a slot of float64, which holds integers exactly.
        """
        tokens, arrive = self.expect(use)
        return Slot.apply(arrive, len(templates), *templates, *tokens)

    def expect(self, use: Use) -> tuple[list[Tensor], Arrive]:
        """Count on the records of `use`: the tokens of the anchors that wait for them, and what takes them."""
        tokens = []
        for anchor in self.clipper.anchors_of(use.sources):
            self._tokens[anchor] = self.clipper.token(anchor)
            tokens.append(self._tokens[anchor])
        for source in use.sources:
            for name in source.roots:
                expected = self.groups.setdefault(self.clipper.group_of[name].index, GroupTape()).expected
                expected[name] = expected.get(name, 0) + 1
        forward = self.forwards.use()
        return tokens, functools.partial(self._arrive_from, forward, use)

    def tokens(self) -> list[Tensor]:
        """The anchors' tokens that the uses of this tape hang on; another backward may have retired them since."""
        return list(self._tokens.values())

    def idle(self) -> list[Tensor]:
        """The tokens of the anchors that no use of this tape hangs on, though their group has others that do.

        Whoever waits for the gradients of a group (DDP's reducer) waits for these parameters, too.
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
        """Take the gradients of a slot; called by autograd, once per use and pass."""
        anchors = self.clipper.anchors_of(use.sources)
        for anchor in anchors:
            self.clipper.pending.setdefault(anchor, {})[id(self)] = self
        if all(tensor is not None for tensor in tensors):
            for source, record in use.build(*tensors):
                for name, entry in self._at_roots(source, record):
                    self._group(name).entries.setdefault(name, []).append(entry)
        arriving = {name for source in use.sources for name in source.roots}
        for source in use.sources:
            for name in source.roots:
                group = self._group(name)
                group.arrived[name] = group.arrived.get(name, 0) + 1
                if group.arrived[name] > group.expected[name]:
                    raise LogicalBatchError(
                        f"Backward reached {source.label} twice before the samples of this micro-batch were clipped: a "
                        f"sample would count twice. Call backward once per micro-batch, on the sum of all its losses."
                    )
                if self.current is Pass.SUMS:
                    self._sum(group, name)
                elif group.arrived[name] == group.expected[name]:
                    self._measure(group, name, closing=group.awaits_only(arriving))

    def _group(self, name: str) -> GroupTape:
        return self.groups[self.clipper.group_of[name].index]

    def _at_roots(self, source: Source, record: Record) -> list[tuple[str, tuple[Source, Record]]]:
        record = record.real()
        if source.isometric:
            return [(source.roots[0], (source, record))]
        pulled = pull_back_per_sample(source, record, self.clipper.values)
        return [(name, (self.clipper.sources[name], root)) for name, root in pulled.items()]

    def _measure(self, group: GroupTape, name: str, *, closing: bool) -> None:
        """Add the squared norms of a parameter of which all uses have arrived."""
        entries = group.entries.pop(name, [])
        if not entries:
            return
        source = entries[0][0]
        if any(other is not source and not (other.exact and other.label == source.label) for other, _ in entries):
            # Uses through different derivations (slices, transposes) meet at the root.
            entries, source = self._common_root(name, entries), self.clipper.sources[name]
        (first, *others) = (record for _, record in entries)
        if not others and isinstance(first, PerSampleGrad) and first.is_small and source.label == name:
            group.small[name] = first
            return
        execution = self.clipper.execution
        norm_sq_B, records = measure([first, *others], execution.norm, keep=execution.keep_per_sample, closing=closing)
        group.add(norm_sq_B)
        if self.current is Pass.BOOK_KEEPING:
            waits = execution.offload_records and not closing
            group.entries[name] = [(source, offloaded(record) if waits else record) for record in records]

    def _common_root(self, name: str, entries: list[tuple[Source, Record]]) -> list[tuple[Source, Record]]:
        root = self.clipper.sources[name]
        return [
            (root, record if source.label == name else pull_back_per_sample(source, record, self._blank(name))[name])
            for source, record in entries
        ]

    def _blank(self, name: str) -> dict[str, Tensor]:
        """Stands in for the value of a root where only its shape counts: FSDP may have freed the value by now."""
        value = self.clipper.values[name]
        return {name: torch.empty(self.clipper.sources[name].shape, dtype=accum_dtype(value), device=value.device)}

    def _settle(self, group: ClippingGroup) -> None:
        """Fix the factors of a group from the norms that have arrived."""
        tape = self.groups[group.index]
        for name in [name for name, count in tape.expected.items() if tape.arrived.get(name, 0) < count]:
            self._measure(tape, name, closing=True)  # a use in a branch that backward never reached has no gradient
        if tape.small:
            tape.bundle = FusedGrads.of(tape.small)
            tape.small.clear()
            tape.add(tape.bundle.norm_sq())
        if tape.norm_sq_B is None:
            return
        norm_B = tape.norm_sq_B.sqrt() * self.loss_scale
        tape.clip_coef_B = self.clipper.function.factor(norm_B, group.threshold) * self.scale_B
        # Whether any is dead, an accelerator would have to be waited for: of many groups, in the midst of backward.
        waits = norm_B.device.type != "cpu" and len(self.clipper.groups) > 1
        # A sum of norms that overflows brings masks that mask nothing, no more.
        tape.nonfinite_B = ~(norm_B < torch.inf) if waits or not math.isfinite(norm_B.sum()) else None
        self.clipper.observe(group, norm_B, self.is_padding_B)

    def _sum(self, group: GroupTape, name: str) -> None:
        """Add the clipped sum of a parameter's records, and drop them."""
        entries = group.entries.pop(name, [])
        clip_coef_B, nonfinite_B = group.clip_coef_B, group.nonfinite_B
        if not entries or clip_coef_B is None:
            return
        if self.clipper.execution.offload_records:
            entries = [(source, fetched(record, clip_coef_B.device)) for source, record in entries]
        if nonfinite_B is not None:
            entries = [(source, record.without(nonfinite_B)) for source, record in entries]
        for source, record in entries:
            total = record.clipped_sum(clip_coef_B)
            if source.label != name:
                total = pull_back(source, total, self._blank(name))[name]
            group.sums[name] = group.sums[name] + total if name in group.sums else total

    def _sum_bundle(self, group: GroupTape) -> None:
        bundle, group.bundle = group.bundle, None
        if bundle is not None and group.clip_coef_B is not None:
            bundle = bundle if group.nonfinite_B is None else bundle.without(group.nonfinite_B)
            group.sums.update(bundle.clipped_sums(group.clip_coef_B))

    def between_passes(self) -> None:
        """End the pass that took the norms; the next one sums."""
        for index, group in self.groups.items():
            self._settle(self.clipper.groups[index])
            group.bundle = None
            group.arrived.clear()
        self.current = Pass.SUMS

    def close(self, anchor: int) -> None:
        """Fix the factors; from now on `take` gives the sums of this anchor, and no further record is accepted."""
        if self.current is Pass.BOOK_KEEPING:
            self._settle(self.clipper.groups[anchor])
        self._closed.add(anchor)

    def take(self, name: str) -> Tensor | None:
        """The clipped sum of one parameter, once; its records are freed. None if no gradient arrived."""
        group = self._group(name)
        self._sum(group, name)
        self._sum_bundle(group)
        total = group.sums.pop(name, None)
        return None if total is None else as_complex(total, self.clipper.anchored[name].dtype)


Take = Callable[[str], Tensor | None]
"""Computes the clipped sum of a parameter by name, once, and frees what it was made of."""

Deliver = Callable[[Sequence[str], Take], Sequence[Tensor | None]]
"""Turns the clipped sums of the named parameters into the gradients that their anchor returns, one per parameter."""


class Clipper:
    """The clipping of one model: its groups, their anchors, and what the factors were."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        deliver: Deliver,
        observe: Callable[[ClippingGroup, Tensor, Tensor | None], None],
        anchored: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
    ) -> None:
        self.shapes = shapes
        """The shapes of the whole parameters, by name."""
        self.values = values
        """The parameters as forward sees them: whole while they are in use, where they are sharded."""
        self.anchored = anchored
        """What the anchors differentiate: the parameters, or what stands in for them where they are sharded."""
        self.groups = groups
        """With the thresholds of the logical batch in progress."""
        self.group_of = {name: group for group in groups for name in group.names}
        self.anchors = [group.names for group in groups]
        """The parameters whose sums an anchor delivers: in one pass they become known a group at a time."""
        if execution.backward_passes == 2:
            self.anchors = [(name,) for name in self.group_of]
        self._anchor_of = {name: i for i, names in enumerate(self.anchors) for name in names}
        self.sources = {name: _root(name, shape) for name, shape in shapes.items()}
        self.function = function
        self.execution = execution
        self.deliver = deliver
        self.observe = observe
        self.pending: dict[int, dict[int, Tape]] = {}
        self.epoch = 0
        """A tape of an earlier epoch takes no more records: its samples would count in another release."""
        self._tokens: dict[int, Tensor] = {}

    def twin(
        self,
        deliver: Deliver,
        observe: Callable[[ClippingGroup, Tensor, Tensor | None], None],
    ) -> Clipper:
        """A clipper of the same groups, in one pass, that delivers elsewhere: for a comparison beside the training."""
        execution = replace(self.execution, backward_passes=1)
        return Clipper(self.shapes, self.groups, self.function, execution, deliver, observe, self.anchored, self.values)

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Clip by these from now on, one a group; between logical batches, so that a sum has one sensitivity."""
        self.groups = tuple(replace(g, threshold=t) for g, t in zip(self.groups, thresholds, strict=True))
        self.group_of = {name: group for group in self.groups for name in group.names}

    def differentiated(self) -> list[Tensor]:
        """What the anchors that are open now differentiate."""
        anchored = [self.anchored[name] for anchor in self._tokens for name in self.anchors[anchor]]
        return [x for x in anchored if x.requires_grad]

    def anchors_of(self, sources: Sequence[Source]) -> list[int]:
        """The numbers of the anchors that deliver the roots of `sources`, each once, in order."""
        return sorted({self._anchor_of[name] for source in sources for name in source.roots})

    def token(self, anchor: int) -> Tensor:
        """The output of an anchor; one serves all forwards up to its next backward."""
        if anchor not in self._tokens:
            with torch.enable_grad():
                parameters = [self.anchored[name] for name in self.anchors[anchor]]
                self._tokens[anchor] = Anchor.apply(functools.partial(self.close, anchor), *parameters)
        return self._tokens[anchor]

    def close(self, anchor: int) -> Sequence[Tensor | None]:
        """Called by the anchor: close it on every tape that has records for it, and deliver their sums."""
        names = self.anchors[anchor]
        self._tokens.pop(anchor, None)
        tapes = list(self.pending.pop(anchor, {}).values())

        def take(name: str) -> Tensor | None:
            total: Tensor | None = None
            for tape in tapes:
                part = tape.take(name)
                total = part if total is None else total if part is None else total + part
            return total

        with in_full_precision(self.values[names[0]].device):
            for tape in tapes:
                tape.close(anchor)
            return self.deliver(names, take)

    def abort(self) -> None:
        """Forget what a backward pass that did not finish has left behind."""
        for tapes in self.pending.values():
            for tape in tapes.values():
                tape.aborted = True
        self.pending.clear()
        self._tokens.clear()


def _root(name: str, shape: Sequence[int]) -> Source:
    return Source(name, name, (name,), tuple(shape), lambda values: values[name], isometric=True, exact=True)
