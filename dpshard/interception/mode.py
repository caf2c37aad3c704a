"""The function mode: looks at every torch function of a forward, and sends those that use a parameter to their rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpshard.interception.stand_ins import Rehearsal, SlotMaker
from dpshard.layout import (
    CallLayout,
    Function,
    Layout,
    Quiet,
    call_key,
    canonical,
    derive,
    function_name,
    outputs_of,
    tensors_of,
)
from dpshard.rules import COMPOSITES, RULES
from dpshard.rules.call import BatchAxis, Build, Source
from dpshard.rules.records import PerSample
from dpshard.tape import Use, dummies_like, hold, tap

Refusal = Callable[..., Exception]
"""(labels of the parameters, function, reason, fix=) -> the error to raise."""

_PASS_THROUGH = frozenset(
    {"data", "grad", "detach", "detach_", "requires_grad", "requires_grad_", "register_hook", "backward"}
)
"""Functions and properties of a parameter that carry no gradient of it."""


_PICKING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("masked_select", "nonzero", "argwhere", "unique", "unique_consecutive")
    if hasattr(owner, name)
)
"""Functions whose number of output rows depends on the values of the data."""


def _has_mask(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class UnknownCall(Exception):
    """A call that the layout does not hold: the model took a course that it did not take when it was probed."""


class InterceptionMode(TorchFunctionMode):
    """Redirects calls that use parameters, with a given layout, to their rules."""

    def __init__(self, sources: dict[Tensor, Source], layout: Layout, slots: SlotMaker, refusal: Refusal) -> None:
        super().__init__()
        self.refusal = refusal
        self.layout = layout
        self.slots = slots
        self.picked: dict[Tensor, None] = {}
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
                self._note_picked(func, args, kwargs, result)
            return result
        return self._redirect(func, args, kwargs)

    def _note_picked(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        """Remember tensors whose rows were picked by values of the data: their shape does not tell rows per sample."""
        picks = func in _PICKING or (func is Tensor.__getitem__ and _has_mask(args[1]))
        if picks or (self.picked and any(x in self.picked for x in tensors_of((args, kwargs)))):
            self.picked.update(dict.fromkeys(outputs_of(result)))

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
        if function_name(func) in _PASS_THROUGH:
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
        if self.picked and any(x in self.picked for x in tensors):
            raise call.refuse(
                "the data has picked the rows of its input (a boolean mask, nonzero, unique), so their shape does not "
                "say which sample a row belongs to. Keep all rows, [B, T, ...], and mask what comes out, or the loss",
                fix=False,
            )
        rule = RULES.get(func)
        if rule is None:
            raise call.refuse("no rule gives its per-sample gradient")
        return rule(call, *args, **kwargs)

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
                fix=False,
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
        dummies = self.mode.slots.slot(Use(tuple(sources), build), *dummies_like(output, keep))
        return output if isinstance(self.mode.slots, Rehearsal) else tap(output, keep, dummies)

    def per_sample(self, x: Tensor) -> Tensor:
        source = self.mode.sources[x]
        use = Use((source,), lambda gradient: [(source, PerSample(gradient))], copies=True)
        (copies,) = self.mode.slots.slot(use, x.detach().unsqueeze(0).expand(self.batch_size, *x.shape))
        return copies

    def refuse(self, reason: str, *, fix: bool = True) -> Exception:
        labels = ", ".join(dict.fromkeys(self.mode.sources[x].label for x in self.tensors if x in self.mode.sources))
        return self.mode.refusal(labels, self.func, reason, fix=fix)
