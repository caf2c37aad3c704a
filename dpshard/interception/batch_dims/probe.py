"""Compare two runs of a model, on batches of two sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpshard.errors import BatchLayoutError
from dpshard.interception.batch_dims.axes import (
    PASS_THROUGH,
    CallKey,
    CallLayout,
    Layout,
    call_key,
    describe,
    merge,
    rows_key,
)
from dpshard.interception.batch_dims.row_order import ROWS, UndecidedDim, settle
from dpshard.interception.determinism import DeterministicForward
from dpshard.interception.protocols import Exchange
from dpshard.interception.routing import ADDING, PACK, PAD, Routing, picks
from dpshard.interception.vmapped import lift, outside_transforms, transforms_are_active
from dpshard.rules import COMPOSITES
from dpshard.rules.call import BatchAxis, Source
from dpshard.rules.modes import Passthrough
from dpshard.rules.parameter_views import derive
from dpshard.rules.torch_functions import (
    Function,
    canonical,
    differentiable,
    function_name,
    outputs_of,
    tensors_of,
)


@dataclass(slots=True)
class _Shapes:
    func: Function
    inputs: list[torch.Size]
    outputs: list[torch.Size]


class _Compared(DeterministicForward):
    """Counts the calls on tensors before the data picks rows."""

    permuting = False  # the first samples of both runs must be the same

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._off: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def off_course(self, tensors: list[Tensor]) -> bool:
        return any(x in self._off for x in tensors)

    def note_course(self, func: Function, args: Any, result: Any, *, off: bool) -> None:
        outputs = outputs_of(result)
        if not off and _counts(result):
            self.count += 1
        if (off and func is not PAD) or picks(func, args):  # pad_packed_sequence returns all samples
            # Experts may write rows into a tensor that both runs have.
            kept = args[0] if args and (func in ADDING or any(x is args[0] for x in outputs)) else None
            if kept is None or self.off_course([kept]):
                for x in outputs:
                    self._off[x] = True

    def lifted(self, func: Function, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a function within torch.vmap on whole tensors; return (result,), or None without such a call."""
        if not transforms_are_active():
            return None
        call = lift(func, args, kwargs)
        if call.differentiated or not any(x.requires_grad for x in tensors_of((call.args, call.kwargs))):
            return None
        with outside_transforms():
            result = self.__torch_function__(call.func, types, call.args, call.kwargs)
        return (call.lower(result),)


def _counts(result: Any) -> bool:
    """Return False for shapes and numbers, because loops may read any number of them."""
    return result is None or bool(outputs_of(result))


class _FirstRun(_Compared):
    def __init__(self, wanted: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.calls: list[_Shapes] = []
        self.wanted = wanted
        self.values: dict[int, list[Tensor]] = {}

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Passthrough.on or func in COMPOSITES:
            return super().__torch_function__(func, types, args, kwargs)
        func, args = canonical(func, args)
        lifted = self.lifted(func, types, args, kwargs or {})
        if lifted is not None:
            return lifted[0]
        inputs = tensors_of((args, kwargs or {}))
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


@dataclass(frozen=True, slots=True)
class _Made:
    position: int
    seen_at: int
    axis: BatchAxis | None
    flattened: bool


class _SecondRun(_Compared):
    def __init__(
        self,
        first: list[_Shapes],
        sizes: tuple[int, int],
        sources: dict[Tensor, Source],
        exchange: Exchange | None,
        *,
        keeps_values: bool = True,
    ) -> None:
        super().__init__()
        self._keeps_values = keeps_values
        self.first, self.sizes, self.sources = first, sizes, dict(sources)
        self.layout: Layout = {}
        self.doubts: dict[int, list[UndecidedDim]] = {}
        self._most: dict[tuple[CallKey, int], int] = {}  # rows per sample, by call and place
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._silent: int | None = 0  # see UndecidedDim.silent
        self.apart = False
        """True once a call had other arguments than in the first run."""
        self.routing = Routing(sizes[1], self._holds_samples, exchange)

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Passthrough.on or func in COMPOSITES:
            return super().__torch_function__(func, types, args, kwargs)
        func, args = canonical(func, args)
        kwargs = kwargs or {}
        lifted = self.lifted(func, types, args, kwargs)
        if lifted is not None:
            return lifted[0]
        tensors = tensors_of((args, kwargs))
        position, off = self.count, self.off_course(tensors)
        # Results under the model's own no_grad are constants.
        traced = torch.is_grad_enabled() and function_name(func) not in PASS_THROUGH
        uses = traced and any(x in self.sources for x in tensors)
        copied = uses and getattr(func, "__name__", "") != "__get__"  # in-place functions would change them
        inputs = [x.detach().clone() if copied else x for x in tensors]
        result = super().__torch_function__(func, types, args, kwargs)
        outputs = outputs_of(result)
        self.note_course(func, args, result, off=off)
        if uses and _counts(result):
            key = call_key(func, tensors, self.sources)
            before = None if off else self._before(position, func, tensors, outputs)
            self._silent = self._without_gradient(func, args, kwargs)
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
                    if differentiable(out) and out not in self.sources:
                        self.sources[out] = derive(func, args, kwargs, self.sources, i, out)
        else:
            self.routing.follow(func, args, kwargs, result)
        if not off:
            self._note_made(position, func, tensors, outputs)
            self.apart |= _counts(result) and self._at(position, func, tensors, outputs) is None
        if func is PACK and self.apart:
            self.routing.lose(outputs)
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

    def _holds_samples(self, x: Tensor, dim: int, read: bool) -> bool:
        made = self.made.get(x)
        if made is None:
            return False
        holds = made.axis is not None and made.axis.dim == dim and not (dim and made.flattened)
        merge(self.layout, {rows_key(x, dim): CallLayout([BatchAxis(dim) if holds else None], None)})
        if read and holds and made.flattened and self._keeps_values:
            doubt = UndecidedDim(ROWS, 0, 0, x.detach().clone(), made.seen_at, rows_key(x, dim))
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
        self._saw(key, place, x.shape[made.axis.dim] // self.sizes[1])
        if made.flattened and self._keeps_values:
            doubt = UndecidedDim(key, place, made.axis.dim, value, made.seen_at, silent=self._silent)
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
            f"The model runs different functions on {self.sizes[1]} samples than on {self.sizes[0]} (at "
            f"{function_name(func)}), so dpshard cannot tell which dimension carries the samples. "
            f"Remove control flow that depends on the batch size, such as a Python loop over samples."
        )

    def _axis(self, key: CallKey, position: int, place: int, old: torch.Size, x: Tensor) -> BatchAxis | None:
        first, second = self.sizes
        if len(old) != x.dim():
            raise BatchLayoutError(f"{describe(key)}: the rank of a tensor depends on the batch size.")
        grown = [d for d in range(x.dim()) if old[d] != x.shape[d]]
        if not grown:
            return None
        dim = grown[0]
        if len(grown) > 1 or old[dim] * second != x.shape[dim] * first or old[dim] % first:
            raise BatchLayoutError(
                f"{describe(key)} sees a tensor of shape {tuple(old)} for {first} samples and {tuple(x.shape)} for "
                f"{second}. Samples of one micro-batch meet before the parameter is used, so no per-sample gradient "
                f"exists."
            )
        self._saw(key, place, old[dim] // first)
        if old[dim] != first and self._keeps_values:
            doubt = UndecidedDim(key, place, dim, x.detach().clone(), place, silent=self._silent)
            self.doubts.setdefault(position, []).append(doubt)
        return BatchAxis(dim)

    def _saw(self, key: CallKey, place: int, k: int) -> None:
        self._most[key, place] = max(k, self._most.get((key, place), 0))

    def keep_orders_of(self, layout: Layout) -> None:
        """Take the orders of rows from another run, because this one is too large to keep values."""
        for key, found in self.layout.items():
            known = layout.get(key)
            if known is not None and len(known.axes) == len(found.axes):
                pairs = zip(found.axes, known.axes, strict=True)
                axes = [replace(a, adjacent=b.adjacent, most=b.most) if a and b else a for a, b in pairs]
            else:
                axes = [a and replace(a, most=1) for a in found.axes]
            self.layout[key] = found.with_axes(axes)

    def note_most(self, rows_per_unit: int) -> None:
        """Note where no sample had more rows than a unit, because such values show no order of more rows."""
        for key, found in self.layout.items():
            few = [self._most.get((key, place), 0) for place in range(len(found.axes))]
            axes = [a and replace(a, most=k if k <= rows_per_unit else 0) for a, k in zip(found.axes, few, strict=True)]
            self.layout[key] = found.with_axes(axes)

    def _without_gradient(self, func: Function, args: Any, kwargs: Any) -> int | None:
        if func not in (F.embedding, torch.embedding):
            return 0
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        if padding is None or (func is torch.embedding and padding == -1):
            return None
        table = next(x for x in tensors_of((args, kwargs)) if x in self.sources)
        return padding % len(table)


def find_layout(
    run: Callable[[int], Any],
    sources: Callable[[], dict[Tensor, Source]],
    sizes: tuple[int, int] = (2, 3),
    *,
    whole: int | None = None,
    rows_per_unit: int = 1,
    verified: bool = True,
    exchange: Exchange | None = None,
) -> Layout:
    """Return the layouts of all calls that use `sources()`.

    `whole`: also run on this number of samples, which may lead to other calls.

    Raises BatchLayoutError where samples mix, or where the batch size decides which calls run.
    """
    first = _FirstRun()
    with first:
        run(sizes[0])
    second = _SecondRun(first.calls, sizes, sources(), exchange)  # the first run gathers sharded parameters
    with second:
        run(sizes[1])
    if second.doubts:
        valued = _FirstRun(frozenset(second.doubts))
        with valued:
            run(sizes[0])
        settle(second.layout, second.doubts, valued.values, sizes, rows_per_unit, verified=verified)
    second.note_most(rows_per_unit)
    if whole is not None:
        other = _SecondRun(first.calls, (sizes[0], whole), sources(), exchange, keeps_values=False)
        with other:
            run(whole)
        other.keep_orders_of(second.layout)
        merge(second.layout, other.layout)
    return second.layout
