"""Which dimension of a tensor carries the samples: found by running the model on batches of two sizes.

[Note: Evidence for the batch dimension]
A shape that happens to match proves nothing ([T, B, D] with T = B; [B * T, D]; a [T, T] table). So the model runs
twice, on 2 and on 3 samples: what is 3/2 as long the second time carries the samples. Rows of one
sample that are flattened into the batch are told apart by their values: the first two samples are the same in both
runs. A function of parameters whose inputs and outputs keep their shapes has met no sample: it derives a tensor from
parameters alone. What is found is keyed by function and parameter, not by order, and holds for every batch size.

A branch that the values of all samples decide (is any token masked?) may be taken in one of the runs alone. Then the
third sample is the first one again, so that whatever holds for any, or for all, of them holds in both.

Calls that follow from what the data picked (a loop over the experts that were hit) have no place in the other run to
be compared with. Of their arguments, those that were made on the common course are known from there, and routed rows
are followed; see [Note: Routed rows] in routing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpshard.calls import Function, Quiet, canonical, function_name, outputs_of, tensors_of
from dpshard.derivation import derive
from dpshard.determinism import Undropped
from dpshard.errors import BatchLayoutError
from dpshard.routing import ADDING, Routing, picks
from dpshard.rules import COMPOSITES
from dpshard.rules.call import BatchAxis, Source

CallKey = tuple[Any, ...]
"""Name of the function, and per tensor argument the form of the source that it is, or its rank.

Strings and numbers alone: dynamo traces the look-up, and cannot hash every function within a tuple.
"""


def call_key(func: Function, tensors: list[Tensor], sources: dict[Tensor, Source]) -> CallKey:
    """What identifies a call whatever the batch size and the length of the inputs: see CallKey."""
    return (function_name(func), *(sources[x].form if x in sources else x.dim() for x in tensors))


@dataclass(slots=True)
class CallLayout:
    """Where the tensors of one kind of call carry the samples."""

    inputs: list[BatchAxis | None]
    """One entry per tensor argument, in order."""
    output: BatchAxis | None
    """For the (first) output."""
    lost: bool = False
    """Whether an argument has rows of which nobody can tell the sample."""

    @property
    def derives(self) -> bool:
        """Whether the call met no sample: its output is derived from parameters alone."""
        return self.output is None and not any(self.inputs) and not self.lost

    @property
    def routed(self) -> bool:
        """Whether an argument has routed rows."""
        return any(axis is not None and axis.routed for axis in self.inputs)

    def in_order(self) -> CallLayout:
        """The same for rows that lie as if they had never been routed."""
        inputs = [axis and BatchAxis(axis.dim, axis.sample_major) for axis in self.inputs]
        return CallLayout(inputs, self.output and BatchAxis(self.output.dim, self.output.sample_major), self.lost)


Layout = dict[CallKey, CallLayout]


def rows_key(x: Tensor) -> CallKey:
    """The key under which a layout holds whether dimension 0 of tensors like `x` carries the samples, for routes."""
    return ("rows", x.dim(), x.shape[-1] if x.dim() > 1 else 0)


def merge(into: Layout, found: Layout) -> None:
    """Add what was found to a layout; BatchLayoutError where a kind of call has samples along different dimensions."""
    for key, layout in found.items():
        known = into.setdefault(key, layout)
        if known != layout and key[0] == "rows":
            known.inputs[0] = None  # of two kinds of tensors with this shape: no evidence for either
        elif known != layout:
            raise BatchLayoutError(
                f"{_describe(key)} is called with the samples of the micro-batch along different dimensions; use a "
                f"module of its own for each of the two."
            )


_ROWS = ("an index along dimension 0",)

PASS_THROUGH = frozenset(
    {"data", "grad", "detach", "detach_", "requires_grad", "requires_grad_", "register_hook", "backward"}
)
"""Functions and properties of a parameter that carry no gradient of it."""

_SAME = 0.1
"""How far the same rows of two runs may be apart, relative to the largest; half precision rounds."""


@dataclass(slots=True)
class _Shapes:
    func: Function
    inputs: list[torch.Size]
    outputs: list[torch.Size]


class _Compared(Undropped):
    """Counts the calls on the common course of two runs: on tensors, and not after what the data has picked."""

    permuting = False  # the first samples of both runs are to be the same

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._off: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def off_course(self, tensors: list[Tensor]) -> bool:
        """Whether a call on these tensors follows from what the data has picked."""
        return any(x in self._off for x in tensors)

    def note_course(self, func: Function, args: Any, result: Any, *, off: bool) -> None:
        """Count a call, or note that its outputs are off the course as well."""
        outputs = outputs_of(result)
        if not off and _counts(result):
            self.count += 1
        if off or picks(func, args):
            # What is written into on the common course stays on it; experts add their rows so.
            kept = args[0] if args and (func in ADDING or any(x is args[0] for x in outputs)) else None
            if kept is None or self.off_course([kept]):
                for x in outputs:
                    self._off[x] = True


def _counts(result: Any) -> bool:
    """Whether a call is more than a question (a shape, a dtype, a number), which a loop may ask at any time."""
    return result is None or bool(outputs_of(result))


class _FirstRun(_Compared):
    """Notes the shapes of every call; and, where asked to, the values of its tensors."""

    def __init__(self, wanted: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.calls: list[_Shapes] = []
        self.wanted = wanted
        self.values: dict[int, list[Tensor]] = {}

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call and note it."""
        if Quiet.on or func in COMPOSITES:
            return super().__torch_function__(func, types, args, kwargs)
        func, args = canonical(func, args)
        inputs = list(tensors_of((args, kwargs or {})))
        shapes, off = [x.shape for x in inputs], self.off_course(inputs)
        wanted = not off and self.count in self.wanted
        values = [x.detach().clone() for x in inputs] if wanted else []
        result = super().__torch_function__(func, types, args, kwargs)
        if not off and _counts(result):
            outputs = outputs_of(result)
            self.calls.append(_Shapes(func, shapes, [x.shape for x in outputs]))
            if wanted:
                self.values[self.count] = values + [x.detach().clone() for x in outputs]
        self.note_course(func, args, result, off=off)
        return result


@dataclass(slots=True)
class _Doubt:
    """A flattened batch dimension whose order only values can tell."""

    key: CallKey
    place: int  # in the layout of that call: among inputs, the output last
    dim: int
    value: Tensor
    seen_at: int  # its place in the call of the first run, which may be another: the one that made it


@dataclass(frozen=True, slots=True)
class _Made:
    """Where on the common course a tensor was made, and which dimension of it carries the samples."""

    position: int
    seen_at: int
    axis: BatchAxis | None
    flattened: bool


class _SecondRun(_Compared):
    """Compares every call with that of the first run, and notes the layout of those that use parameters."""

    def __init__(self, first: list[_Shapes], sizes: tuple[int, int], sources: dict[Tensor, Source]) -> None:
        super().__init__()
        self.first, self.sizes, self.sources = first, sizes, dict(sources)
        self.layout: Layout = {}
        self.doubts: dict[int, list[_Doubt]] = {}
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.routing = Routing(sizes[1], self._holds_samples)

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call and note its layout."""
        if Quiet.on or func in COMPOSITES:
            return super().__torch_function__(func, types, args, kwargs)
        func, args = canonical(func, args)
        kwargs = kwargs or {}
        tensors = list(tensors_of((args, kwargs)))
        position, off = self.count, self.off_course(tensors)
        # What the model computes under its own no_grad is a constant, as it is in training.
        differentiable = torch.is_grad_enabled() and function_name(func) not in PASS_THROUGH
        uses = differentiable and any(x in self.sources for x in tensors)
        inputs = [x.detach().clone() if uses else x for x in tensors]  # before an in-place function changes them
        result = super().__torch_function__(func, types, args, kwargs)
        outputs = outputs_of(result)
        self.note_course(func, args, result, off=off)
        if uses and _counts(result):
            key = call_key(func, tensors, self.sources)
            before = None if off else self._before(position, func, tensors, outputs)
            axes = [
                None if x in self.sources else self._input(key, position, place, before, x, value)
                for place, (x, value) in enumerate(zip(tensors, inputs, strict=True))
            ]
            lost = any(self._is_lost(x, off=off) for x in tensors if x not in self.sources)
            self.routing.follow(func, args, kwargs, result)
            output = self._output(key, position, len(axes), before, outputs[0]) if outputs else None
            found = CallLayout(axes, output, lost)
            merge(self.layout, {key: found})
            if found.derives:
                for i, out in enumerate(outputs):
                    if out.is_floating_point() and out not in self.sources:
                        self.sources[out] = derive(func, args, kwargs, self.sources, i, out)
        else:
            self.routing.follow(func, args, kwargs, result)
        if not off:
            self._note_made(position, func, tensors, outputs)
        return result

    def _note_made(self, position: int, func: Function, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        before = self._at(position, func, inputs, outputs)
        for i, x in enumerate(outputs):
            if before is not None and x not in self.sources:
                old = before.outputs[i]
                grown = [d for d in range(x.dim()) if len(old) == x.dim() and old[d] != x.shape[d]]
                fits = len(grown) == 1 and old[grown[0]] * self.sizes[1] == x.shape[grown[0]] * self.sizes[0]
                axis = BatchAxis(grown[0]) if fits else None
                flattened = fits and old[grown[0]] != self.sizes[0]
                self.made[x] = _Made(position, len(inputs) + i, axis, flattened)

    def _holds_samples(self, x: Tensor, read: bool) -> bool:
        """Evidence for a route that starts, or ends, at `x`; it is kept in the layout, for the training's forwards."""
        made = self.made.get(x)
        if made is None:
            return False
        holds = made.axis is not None and made.axis.dim == 0
        merge(self.layout, {rows_key(x): CallLayout([BatchAxis(0) if holds else None], None)})
        if read and holds and made.flattened:
            doubt = _Doubt(_ROWS, 0, 0, x.detach().clone(), made.seen_at)
            self.doubts.setdefault(made.position, []).append(doubt)
        return holds

    def _is_lost(self, x: Tensor, *, off: bool) -> bool:
        if self.routing.lost(x):
            return True
        known = x in self.made or self.routing.samples(x) is not None or isinstance(x, torch.nn.Parameter)
        return off and not known and x.dim() > 0

    def _input(
        self, key: CallKey, position: int, place: int, before: _Shapes | None, x: Tensor, value: Tensor
    ) -> BatchAxis | None:
        if self.routing.samples(x) is not None:
            return BatchAxis(0, routed=True)
        if self._is_lost(x, off=before is None):
            return None
        if before is not None:
            return self._axis(key, position, place, before.inputs[place], value)
        made = self.made.get(x)
        if made is None or made.axis is None:
            return None
        if made.flattened:
            doubt = _Doubt(key, place, made.axis.dim, value, made.seen_at)
            self.doubts.setdefault(made.position, []).append(doubt)
        return made.axis

    def _output(self, key: CallKey, position: int, place: int, before: _Shapes | None, x: Tensor) -> BatchAxis | None:
        if self.routing.samples(x) is not None:
            return BatchAxis(0, routed=True)
        if before is None or self.routing.lost(x):
            return None
        return self._axis(key, position, place, before.outputs[0], x)

    def _at(self, position: int, func: Function, inputs: list[Tensor], outputs: list[Tensor]) -> _Shapes | None:
        if position < len(self.first):
            before = self.first[position]
            if before.func == func and len(before.inputs) == len(inputs) and len(before.outputs) == len(outputs):
                return before
        return None

    def _before(self, position: int, func: Function, inputs: list[Tensor], outputs: list[Tensor]) -> _Shapes:
        before = self._at(position, func, inputs, outputs)
        if before is not None:
            return before
        raise BatchLayoutError(
            f"The model runs other functions on {self.sizes[1]} samples than on {self.sizes[0]} (at "
            f"{function_name(func)}), so it cannot be told which dimension carries the samples. "
            f"Remove control flow that depends on the batch size, such as a Python loop over samples."
        )

    def _axis(self, key: CallKey, position: int, place: int, old: torch.Size, x: Tensor) -> BatchAxis | None:
        first, second = self.sizes
        if len(old) != x.dim():
            raise BatchLayoutError(f"{_describe(key)}: the rank of a tensor depends on the batch size.")
        grown = [d for d in range(x.dim()) if old[d] != x.shape[d]]
        if not grown:
            return None
        dim = grown[0]
        if len(grown) > 1 or old[dim] * second != x.shape[dim] * first or old[dim] % first:
            raise BatchLayoutError(
                f"{_describe(key)} sees a tensor of shape {tuple(old)} for {first} samples and {tuple(x.shape)} for "
                f"{second}: samples of one micro-batch meet each other before the parameter is used, so no "
                f"per-sample gradient exists."
            )
        if old[dim] != first:
            self.doubts.setdefault(position, []).append(_Doubt(key, place, dim, x.detach(), place))
        return BatchAxis(dim)

    def resolve(self, values: dict[int, list[Tensor]]) -> None:
        """Settle the order of flattened dimensions from the values of the first run."""
        settled: dict[tuple[CallKey, int], bool] = {}
        undecided: list[_Doubt] = []
        for position, doubts in self.doubts.items():
            for doubt in doubts:
                order = self._is_sample_major(doubt, values[position][doubt.seen_at])
                if order is None:
                    undecided.append(doubt)
                elif settled.setdefault((doubt.key, doubt.place), order) != order:
                    raise BatchLayoutError(
                        f"{_describe(doubt.key)} is called with the rows of the samples in different orders; use a "
                        f"module of its own for each of the two."
                    )
        for doubt in undecided:
            settled[doubt.key, doubt.place] = self._as_beside(doubt, settled)
        for (key, place), order in settled.items():
            if not order:
                layout = self.layout[key]
                axis = layout.inputs[place] if place < len(layout.inputs) else layout.output
                assert axis is not None
                axis = replace(axis, sample_major=False)
                if place < len(layout.inputs):
                    layout.inputs[place] = axis
                else:
                    layout.output = axis

    def _is_sample_major(self, doubt: _Doubt, old: Tensor) -> bool | None:
        """Whether the rows of a sample lie side by side; None if values do not tell."""
        (first, second), new = self.sizes, doubt.value
        k = old.shape[doubt.dim] // first
        error, scale = {}, float(old.double().abs().nan_to_num_(0).max())
        for order in (True, False):
            sides = []
            for x, size in ((old, first), (new, second)):
                rows = x.unflatten(doubt.dim, (size, k) if order else (k, size))
                sides.append(rows.narrow(doubt.dim + (not order), 0, first).double())
            error[order] = float((sides[0] - sides[1]).abs().nan_to_num_(0).max())
        if min(error.values()) > _SAME * scale:
            raise BatchLayoutError(
                f"{_describe(doubt.key)} sees a tensor of shape {tuple(new.shape)} for {second} samples, whose "
                f"dimension {doubt.dim} holds the rows of a sample neither side by side ([B, k], flattened) "
                f"nor one batch apart ([k, B]). Put the samples first before you flatten."
            )
        if max(error.values()) <= 2 * min(error.values()):
            return None
        if error[False] < error[True] and doubt.key == _ROWS:
            raise BatchLayoutError(
                f"Rows are picked along dimension 0 of a tensor of shape {tuple(new.shape)}, which holds the "
                f"rows of a sample one batch apart ([k, B]). Put the samples first before you flatten."
            )
        return error[True] < error[False]

    def _as_beside(self, doubt: _Doubt, settled: dict[tuple[CallKey, int], bool]) -> bool:
        """The order of rows that are all alike: that of other calls of the kind, or of other arguments."""
        orders = [order for (key, _), order in settled.items() if key == doubt.key]
        if (doubt.key, doubt.place) in settled:
            return settled[doubt.key, doubt.place]
        if isinstance(doubt.value, FakeTensor):
            return all(orders)  # it has no values, and nothing is trained with it: a plan counts what a step costs
        if not orders and (doubt.key == _ROWS or doubt.place < len(self.layout[doubt.key].inputs)):
            raise BatchLayoutError(
                f"{_describe(doubt.key)} sees the same number everywhere in a tensor of shape "
                f"{tuple(doubt.value.shape)} for {self.sizes[1]} samples, so it cannot be told whether its dimension "
                f"{doubt.dim} holds the rows of a sample side by side ([B, k], flattened) or one batch apart ([k, B]). "
                f"Keep the samples in a dimension of their own, or begin with small random weights rather than zeros."
            )
        return all(orders)


def find_layout(
    run: Callable[[int], Any], sources: Callable[[], dict[Tensor, Source]], sizes: tuple[int, int] = (2, 3)
) -> Layout:
    """Layouts of all calls that use `sources()`; `run(n)` runs the model on the first n samples of a batch.

    Raises BatchLayoutError where samples meet each other, or where the model's course depends on the batch size.
    """
    first = _FirstRun()
    with first:
        run(sizes[0])
    second = _SecondRun(first.calls, sizes, sources())  # sharded parameters exist once the first run has gathered them
    with second:
        run(sizes[1])
    if second.doubts:
        valued = _FirstRun(frozenset(second.doubts))
        with valued:
            run(sizes[0])
        second.resolve(valued.values)
    return second.layout


def _describe(key: CallKey) -> str:
    labels = [x for x in key[1:] if isinstance(x, str)]
    return f"{key[0]} with {', '.join(labels)}"
