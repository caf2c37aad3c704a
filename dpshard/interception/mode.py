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
from dpshard.interception.slots import Premade, Rehearsal, SlotMaker
from dpshard.records import PerSample
from dpshard.rules import COMPOSITES, ROUTED_RULES, RULES
from dpshard.rules.call import BatchAxis, Build, Source
from dpshard.rules.parameter_views import derive
from dpshard.rules.torch_functions import Function, Quiet, canonical, function_name, outputs_of, tensors_of

Refusal = Callable[..., Exception]
"""(labels of the parameters, function, reason, advise=) -> the error to raise."""

_LOST = (
    "the data has picked the rows of its input on a way that cannot be followed (a mask, nonzero, unique, and then a "
    "function that mixes rows; a packed sequence that was not made by pack_padded_sequence from a tensor with a row a "
    "sample, or that was padded and not put in its first order again), so nobody can tell which sample a row belongs "
    "to. Keep all rows, [B, T, ...], and mask what comes out, or the loss"
)
_ROUTED = (
    "the data has picked the rows of its input, as for experts, and {}. Rows that are routed may go through linear "
    "maps, grouped products and elementwise functions with a parameter, one sample's rows beside another's; keep all "
    "rows, [B, T, ...], before any other, and add a row only to rows of its own sample"
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
        if not (self._uses(args) or (kwargs and self._uses(kwargs.values()))):
            result = func(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self.routing.follow(func, args, kwargs, result)
            return result
        return self._redirect(func, args, kwargs)

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
        if not torch.is_grad_enabled() and not isinstance(self.slots, Rehearsal):
            return func(*args, **kwargs)
        if layout is None:
            result = func(*args, **kwargs)
            if any(x.is_floating_point() for x in outputs_of(result)):
                raise UnknownCall
            return result  # a shape, a comparison, a printed value: nothing that a gradient flows through
        if layout.derives:
            return self._derive(func, args, kwargs)
        call = _InterceptedCall(self, func, args, kwargs, tensors, layout)
        compiling = torch.compiler.is_compiling()
        rules = ROUTED_RULES if (layout.lost or layout.routed or not compiling) and self._routed(call) else RULES
        rule = rules.get(func)
        if rule is None:
            raise call.refuse("no rule gives its per-sample gradient")
        result = rule(call, *args, **kwargs)
        if not compiling:
            self.routing.follow(func, args, kwargs, result)
        return result

    def _routed(self, call: _InterceptedCall) -> bool:
        """Whether a call meets routed rows, which do not lie as if they had never been routed."""
        if call.layout.routed and (torch.compiler.is_compiling() or isinstance(self.slots, Rehearsal | Premade)):
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
        if call.func not in ROUTED_RULES or not call.layout.routed:
            raise call.refuse(_ROUTED.format("there is no rule for such rows"), advise=False)
        call.samples = sample_N
        return True

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
            elif output.is_floating_point():
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
        self.samples: Tensor | None = None

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
        return x if isinstance(self.mode.slots, Rehearsal) else hold(x)

    def tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Any, build: Build) -> Tensor:
        use, slots = Use(tuple(sources), build), self.mode.slots
        if (expected := slots.expect(use)) is not None:
            return tap(output, keep, *expected)
        dummies = slots.slot(use, *dummies_like(output, keep))
        return output if isinstance(slots, Rehearsal) else tap(output, keep, dummies, None)

    def per_sample(self, x: Tensor) -> Tensor:
        source = self.mode.sources[x]
        use = Use((source,), lambda gradient: [(source, PerSample(gradient))], copies=True)
        (copies,) = self.mode.slots.slot(use, x.detach().unsqueeze(0).expand(self.batch_size, *x.shape))
        return copies

    def refuse(self, reason: str, *, advise: bool = True) -> Exception:
        labels = ", ".join(dict.fromkeys(self.mode.sources[x].label for x in self.tensors if x in self.mode.sources))
        return self.mode.refusal(labels, self.func, reason, advise=advise)
