"""The function mode: looks at every torch function of a forward, and sends those that use a parameter to their rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpshard.clipping.autograd_nodes import dummies_like, hold, tap
from dpshard.clipping.tape import Use
from dpshard.interception.batch_dims import (
    PASS_THROUGH,
    CallLayout,
    Layout,
    call_key,
    rows_key,
)
from dpshard.interception.routing import Routing
from dpshard.interception.slots import PreallocatedSlots, SlotMaker, SlotRecorder
from dpshard.interception.vmapped import Lifted, Vmapped, lift, transforms_are_active
from dpshard.records import PerSampleGrad
from dpshard.rules import COMPOSITES, ROUTED_RULES, RULES
from dpshard.rules.call import BatchAxis, Build, Source
from dpshard.rules.derived import ISOMETRIC, ISOMETRIC_PROPERTIES
from dpshard.rules.parameter_views import derive
from dpshard.rules.routed import at_samples
from dpshard.rules.torch_functions import (
    Function,
    Quiet,
    canonical,
    differentiable,
    function_name,
    outputs_of,
    tensors_of,
)
from dpshard.rules.vectorized import vectorized

Refusal = Callable[..., Exception]
"""(labels of the parameters, function, reason, advise=) -> the error to raise."""

_NO_RULE = "no rule gives its per-sample gradient"
_NO_SAMPLES = (
    "what it takes was read at places that carry no samples of the micro-batch (flat ids with offsets, say: pass ids "
    "[B, T], and flatten them in forward)"
)
_LOST = (
    "the data has picked the rows of its input on a way that cannot be followed (a mask, nonzero, unique, and then a "
    "function that mixes rows; a packed sequence that was not made by pack_padded_sequence from a tensor with a row a "
    "sample, or that was padded and not put in its first order again), so nobody can tell which sample a row belongs "
    "to. Keep all rows, [B, T, ...], and mask what comes out, or the loss"
)
_ROUTED = (
    "the data has picked the rows of its input, as for experts, and {}. Rows that are routed may go through functions "
    "that treat every row by itself (linear maps, convolutions, norms, attention within a row, elementwise functions) "
    "and grouped products; keep all rows, [B, T, ...], before any other, and add a row only to rows of its own sample"
)


class UnknownCall(Exception):
    """A call that the layout does not hold: the model took a course that it did not take when it was probed."""


class InterceptionMode(TorchFunctionMode):
    """Redirects calls that use parameters, with a given layout, to their rules."""

    def __init__(self, sources: dict[Tensor, Source], layout: Layout, slots: SlotMaker, refusal: Refusal) -> None:
        super().__init__()
        self.refusal = refusal
        self.layout = layout
        self.slots = slots
        self.routing = Routing(slots.batch_size, self._holds_samples)
        self.sources = dict(sources)  # grows by what the forward derives

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, through its rule if it uses a trainable parameter."""
        kwargs = kwargs or {}
        if Quiet.on:
            return func(*args, **kwargs)
        func, args = canonical(func, args)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if transforms_are_active():
            lifted = lift(func, args, kwargs)
            if self._uses(tensors_of((lifted.args, lifted.kwargs))):
                return self._lifted(lifted, types)
        if not (self._uses(args) or (kwargs and self._uses(kwargs.values()))):
            result = func(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self.routing.follow(func, args, kwargs, result)
            return result
        return self._redirect(func, args, kwargs)

    def _lifted(self, call: Lifted, types: Any) -> Any:
        reason = ""
        if call.differentiated:
            reason = (
                "it is called within torch.func.grad, jvp or jacrev, where no per-sample gradient is followed. Write "
                "out the derivative"
            )
        elif isinstance(self.slots, SlotRecorder | PreallocatedSlots):
            reason = "torch.vmap is not followed into torch.compile; leave what calls it out of what is compiled"
        if reason:
            used = [x for x in tensors_of((call.args, call.kwargs)) if x in self.sources]
            raise self.refusal(", ".join(self.sources[x].label for x in used), call.func, reason, advise=False)
        with call.outside():
            result = self.__torch_function__(call.func, types, call.args, call.kwargs)
        return call.lower(result)

    def _holds_samples(self, x: Tensor, dim: int, read: bool) -> bool:
        known = self.layout.get(rows_key(x, dim))
        if known is None and read and x.requires_grad and x.shape[dim] == self.slots.batch_size:
            raise UnknownCall  # rows are picked on a course that was not probed
        return known is not None and known.inputs[0] is not None

    def _uses(self, args: Any) -> bool:
        for x in args:
            if isinstance(x, Tensor):
                if x in self.sources:
                    return True
            elif isinstance(x, (tuple, list)) and self._uses(x):
                return True
        return False

    def _redirect(self, func: Function, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_of((args, kwargs)))
        layout = self.layout.get(call_key(func, tensors, self.sources))
        if function_name(func) in PASS_THROUGH:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() and not isinstance(self.slots, SlotRecorder):
            return func(*args, **kwargs)
        if layout is None and not torch.compiler.is_compiling():
            layout = self._unprobed(func, tensors)
        if layout is None:
            result = func(*args, **kwargs)
            if any(differentiable(x) for x in outputs_of(result)):
                raise UnknownCall
            return result  # a shape, a comparison, a printed value: nothing that a gradient flows through
        if layout.derives:
            return self._derive(func, args, kwargs)
        call = _InterceptedCall(self, func, args, kwargs, tensors, layout)
        compiling = torch.compiler.is_compiling()
        routed = (layout.lost or layout.routed or not compiling) and self._routed(call)
        rule = vectorized if isinstance(func, Vmapped) else RULES.get(func)
        rule = ROUTED_RULES.get(func, rule) if routed else rule
        if rule is None:
            raise call.refuse(_NO_RULE if call.has_met_no_constants() else f"{_NO_RULE}; {_NO_SAMPLES}")
        if routed and not call.batch_size:
            args, kwargs = pytree.tree_map_only(Tensor, call.plain, (args, kwargs))
            result = func(*args, **kwargs)  # an expert to which no row came
        else:
            result = rule(call, *args, **kwargs)
        if not compiling:
            self.routing.follow(func, args, kwargs, result)
        if routed and any(self.routing.samples(x) is None for x in outputs_of(result)):
            raise call.refuse(_ROUTED.format("this function is not known to treat them one by one"), advise=False)
        return result

    def _routed(self, call: _InterceptedCall) -> bool:
        """Whether a call meets routed rows, which do not lie as if they had never been routed."""
        if call.layout.routed and (
            torch.compiler.is_compiling() or isinstance(self.slots, SlotRecorder | PreallocatedSlots)
        ):
            raise call.refuse(_ROUTED.format("torch.compile would fix their number; leave it out of what is compiled"))
        data = [x for x in call.tensors if x not in self.sources]
        if call.layout.lost or any(self.routing.lost(x) for x in data):
            raise call.refuse(_LOST, advise=False)
        routed = [x for x in data if self.routing.samples(x) is not None]
        expected = [x for x, axis in zip(call.tensors, call.layout.inputs, strict=True) if axis and axis.routed]
        if not routed and not expected:
            return False
        sample_N = self.routing.agreed(routed) if routed else None
        if sample_N is None or any(all(x is not y for y in routed) for x in expected):
            raise call.refuse(_ROUTED.format("its inputs hold rows of different samples side by side"), advise=False)
        if self.routing.in_order(sample_N) and call.func in RULES:
            call.layout = call.layout.in_order()
            call.output_axis = call.layout.output
            return False
        if call.output_axis is None or not call.output_axis.routed:
            raise call.refuse(_ROUTED.format("this function is not known to treat them one by one"), advise=False)
        call.take_rows_for_samples(sample_N)
        return True

    def _unprobed(self, func: Function, tensors: list[Tensor]) -> CallLayout | None:
        """The layout of a call that no probe has met, where nothing else is possible: of an expert that had no row."""
        data = [x for x in tensors if x not in self.sources]
        if not data and (func in ISOMETRIC or function_name(func) in ISOMETRIC_PROPERTIES):
            return CallLayout([None] * len(tensors), None)
        if not data or any(self.routing.samples(x) is None for x in data):
            return None
        rows = BatchAxis(0, routed=True)
        return CallLayout([None if x in self.sources else rows for x in tensors], rows)

    def _derive(self, func: Function, args: Any, kwargs: Any) -> Any:
        cut: dict[Tensor, Source] = {}

        def plain(x: Tensor) -> Tensor:
            if x not in self.sources:
                return x
            detached = x.detach()
            cut[detached] = self.sources[x]
            return detached

        plain_args, plain_kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
        tensors = [] if torch.compiler.is_compiling() else list(tensors_of((plain_args, plain_kwargs)))
        versions = [x._version for x in tensors]  # seen by the rehearsal and the verification, where compiled
        result = func(*plain_args, **plain_kwargs)
        if any(x._version != version for x, version in zip(tensors, versions, strict=True)):
            raise self.refusal(
                ", ".join(dict.fromkeys(source.label for source in cut.values())),
                func,
                "it writes into a tensor that no sample has met, by which its gradient would be lost; build that "
                "tensor out of place (torch.cat, torch.where)",
                advise=False,
            )
        for index, output in enumerate(outputs_of(result)):
            if output in cut:
                self.sources[output] = cut[output]  # a cast to the dtype that it has: the same tensor comes back
            elif differentiable(output):
                self.sources[output] = derive(func, args, kwargs, self.sources, index, output)
        return result


class _InterceptedCall:
    """See rules.call.Call."""

    def __init__(
        self, mode: InterceptionMode, func: Function, args: Any, kwargs: Any, tensors: list[Tensor], layout: CallLayout
    ) -> None:
        self.mode, self.func, self.args, self.kwargs = mode, func, args, kwargs
        self.tensors, self.layout = tensors, layout
        self.batch_size = mode.slots.batch_size
        self.output_axis = layout.output
        self.samples: Tensor | None = None  # of routed rows, [N]

    def take_rows_for_samples(self, sample_N: Tensor) -> None:
        """Let the rule know of N samples; what it records goes to those that the rows belong to."""
        self.samples, self.batch_size = sample_N, len(sample_N)

    def source(self, x: Any) -> Source | None:
        return self.mode.sources.get(x) if isinstance(x, Tensor) else None

    def plain(self, x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) and x in self.mode.sources else x

    def axis(self, x: Tensor) -> BatchAxis | None:
        for tensor, axis in zip(self.tensors, self.layout.inputs, strict=True):
            if tensor is x:
                return axis
        return None

    def hold(self, x: Tensor) -> Tensor:
        return x if isinstance(self.mode.slots, SlotRecorder) else hold(x)

    def tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Any, build: Build) -> Tensor:
        slots = self.mode.slots
        use = Use(tuple(sources), build if self.samples is None else self._at_samples(build, self.samples))
        if (expected := slots.expect(use)) is not None:
            return tap(output, keep, *expected)
        dummies = slots.slot(use, *dummies_like(output, keep))
        return output if isinstance(slots, SlotRecorder) else tap(output, keep, dummies, None)

    def per_sample(self, x: Tensor) -> Tensor:
        source = self.mode.sources[x]
        use = Use((source,), lambda gradient: [(source, PerSampleGrad(gradient))], copies=True)
        (copies,) = self.mode.slots.slot(use, x.detach().unsqueeze(0).expand(self.mode.slots.batch_size, *x.shape))
        return copies if self.samples is None else copies[self.samples]

    def _at_samples(self, build: Build, sample_N: Tensor) -> Build:
        """What makes records of routed rows, as those of the samples that they belong to."""
        B = self.mode.slots.batch_size
        return lambda *tensors: [at_samples(source, record, sample_N, B) for source, record in build(*tensors)]

    def has_met_no_constants(self) -> bool:
        """Whether its sources were made of parameters alone."""
        return all(self.mode.sources[x].exact for x in self.tensors if x in self.mode.sources)

    def refuse(self, reason: str, *, advise: bool = True) -> Exception:
        labels = ", ".join(dict.fromkeys(self.mode.sources[x].label for x in self.tensors if x in self.mode.sources))
        return self.mode.refusal(labels, self.func, reason, advise=advise)
