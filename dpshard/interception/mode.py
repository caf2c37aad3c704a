"""The function mode, which redirects uses of parameters to rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dpshard.clipping.autograd_nodes import runs_as_python
from dpshard.errors import UnsupportedParameterError
from dpshard.interception.batch_dims import PASS_THROUGH, CallLayout, Layout, call_key, rows_key
from dpshard.interception.call import ForwardContext, InterceptedCall
from dpshard.interception.packed import NOT_BY_TOKEN, TokenGrid, replaced, writes_in_place
from dpshard.interception.plans import Plans
from dpshard.interception.routed_calls import ONE_BY_ONE, with_places, with_routed_rows
from dpshard.interception.routing import STARTING, Routing
from dpshard.interception.slots import ANOTHER_COURSE, Slots
from dpshard.interception.vmapped import Lifted, Vmapped, lift, outside_transforms
from dpshard.rules import COMPOSITES, ROUTED_RULES, RULES
from dpshard.rules.call import BatchAxis, Source
from dpshard.rules.derived import ISOMETRIC, ISOMETRIC_PROPERTIES
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
from dpshard.rules.vectorized import vectorized

_NO_RULE = "no rule gives its per-sample gradient"
_NO_SAMPLES = (
    "its arguments come from places that carry no samples of the micro-batch (for example flat ids with offsets: pass "
    "ids [B, T], and flatten them in forward)"
)
_IN_GRAD = (
    "it is called within torch.func.grad, jvp or jacrev, through which per-sample gradients cannot be followed. Write "
    "out the derivative"
)
_IN_COMPILED_VMAP = "torch.compile hides what torch.vmap does; leave the code that calls torch.vmap uncompiled"
_IN_PLACE = (
    "it writes into a tensor that no sample has met, which would lose its gradient; build that tensor out of place "
    "(torch.cat, torch.where)"
)


class UnknownCall(Exception):
    """A call for which no probe has found a layout."""


class InterceptionMode(TorchFunctionMode):
    """Redirects calls that use parameters to their rules."""

    rehearsals: dict[Any, Any] | None = None
    """Rehearsals of compiled regions, by layout and number of samples."""

    def __init__(
        self,
        sources: dict[Tensor, Source],
        layout: Layout,
        slots: Slots,
        context: ForwardContext,
    ) -> None:
        super().__init__()
        self.context = context
        self.layout = layout
        self.slots = slots
        self.sources = dict(sources)  # a copy, because the forward adds derived tensors
        self.plans: Plans | None = None
        """Plans of calls that every forward repeats; see [Note: Plans of calls]."""
        self.trained: dict[Tensor, Source] | None = None
        """Identifies the set of parameters among the sources: an equal set is the same object. None if unknown."""
        self._routing: Routing | None = None

    def with_slots(self, slots: Slots) -> InterceptionMode:
        """Return a mode that records in `slots`."""
        mode = InterceptionMode(self.sources, self.layout, slots, self.context)
        mode.plans, mode.trained, mode.rehearsals = self.plans, self.trained, self.rehearsals
        return mode

    def rebind(self, parameter: Tensor, source: Source) -> None:
        """Add a gathered parameter, or remove a frozen one."""
        if self.sources.get(parameter) is (source if parameter.requires_grad else None):
            return
        self.trained = None
        if parameter.requires_grad:
            self.sources[parameter] = source
        else:
            del self.sources[parameter]

    def suspects(self, n: int) -> list[int]:
        """Return up to n samples to compare; see Routing.suspects."""
        return [] if self._routing is None else self._routing.suspects(n)

    def refusal(self, labels: str, func: Function, reason: str, *, advise: bool = True) -> Exception:
        """Return the error for the use of these parameters in a function."""
        # A method, so that dynamo does not trace the model.
        return self.context.refusal(labels, func, reason, advise=advise)

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Passthrough.on:
            return func(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and self.plans is not None and func in self.plans.uses:
            plain = self._routing is None or self._routing.idle
            use = self.plans.find(func, args, kwargs, self.sources) if plain else None
            if use is not None:
                return use.repeat(self.slots, args, kwargs)
        func, args = canonical(func, args)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if func is checkpoint:  # dynamo would trace its repetition without modes
            return checkpoint(self._within(args[0]), *args[1:], **kwargs)
        if not compiling and torch._C._are_functorch_transforms_active():
            lifted = lift(func, args, kwargs)
            if self._uses(tensors_of((lifted.args, lifted.kwargs))):
                return self._lifted(lifted, types)
        if not (self._uses(args) or (kwargs and self._uses(kwargs.values()))):
            result = func(*args, **kwargs)
            if not compiling and (self._routing is not None or func in STARTING):
                self.routing.follow(func, args, kwargs, result)
            return result
        return self._redirect(func, args, kwargs, compiling=compiling)

    def _within(self, forward: Function) -> Function:
        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return within

    def _uses(self, args: Any) -> bool:
        for x in args:
            if isinstance(x, Tensor):
                if x in self.sources:
                    return True
            elif isinstance(x, (tuple, list)) and self._uses(x):
                return True
        return False

    def _lifted(self, call: Lifted, types: Any) -> Any:
        if call.differentiated or self.slots.compiled:
            used = [x for x in tensors_of((call.args, call.kwargs)) if x in self.sources]
            reason = _IN_GRAD if call.differentiated else _IN_COMPILED_VMAP
            raise self.refusal(", ".join(self.sources[x].label for x in used), call.func, reason, advise=False)
        with outside_transforms():
            result = self.__torch_function__(call.func, types, call.args, call.kwargs)
        return call.lower(result)

    def _redirect(self, func: Function, args: Any, kwargs: Any, *, compiling: bool) -> Any:
        tensors = tensors_of((args, kwargs))
        key = call_key(func, tensors, self.sources)
        if key[0] in PASS_THROUGH or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        context = self.context
        if context.grid is not None:
            return self._by_token(context.grid, func, args, kwargs, tensors, compiling=compiling)
        layout = self.layout.get(key)
        in_region = self.slots.compiled and not self.slots.rehearses
        if layout is None and not compiling and not in_region:
            layout = self._unprobed(func, tensors)
        if layout is None:
            result = func(*args, **kwargs)
            if any(differentiable(x) for x in outputs_of(result)):
                raise UnsupportedParameterError(ANOTHER_COURSE) if in_region else UnknownCall
            return result  # shapes carry no gradient
        if layout.derives:
            return self._derive(func, args, kwargs)
        call = InterceptedCall(
            func, args, kwargs, tensors, layout, self.sources, self.slots, self.refusal, context.rows_per_unit
        )
        call.exchange = context.exchange
        routes = not compiling and self._routing is not None and not self._routing.idle
        if layout.data_dependent or routes:
            call = with_routed_rows(call, self.routing)
            if call.samples is not None:
                return self._run_routed(with_places(call))
        if context.exchange is not None:
            call = with_places(call)
        elif not (compiling or routes or layout.data_dependent):
            call.plans = self.plans
        result = self._rule(func, call)(call, *args, **kwargs)
        if not compiling and (self._routing is not None or func in STARTING):
            self.routing.follow(func, args, kwargs, result)
        return result

    def _by_token(
        self, grid: TokenGrid, func: Function, args: Any, kwargs: Any, tensors: list[Tensor], *, compiling: bool
    ) -> Any:
        routing = None if compiling else self._routing
        routes = routing is not None and not routing.idle
        routed = [routes and x not in self.sources and self.routing.samples(x) is not None for x in tensors]
        places = [
            None if x in self.sources or of_route else grid.place(x)
            for x, of_route in zip(tensors, routed, strict=True)
        ]
        axes = [BatchAxis(0, routed=r) if r or p is not None else None for p, r in zip(places, routed, strict=True)]
        flat = [x if p is None else grid.by_token(x, p) for x, p in zip(tensors, places, strict=True)]
        layout = CallLayout(axes, BatchAxis(0, routed=any(routed)) if any(axes) else None)
        call = InterceptedCall(func, args, kwargs, flat, layout, self.sources, self.slots, self.refusal)
        if layout.derives:
            if any(x.requires_grad for x in tensors if x not in self.sources):
                raise call.refuse(NOT_BY_TOKEN, advise=False)
            return self._derive(func, args, kwargs)
        if routes:
            call = with_routed_rows(call, self.routing)
            if call.samples is not None:
                return self._run_routed(call)
        found = {p for p in places if p is not None}
        place = found.pop() if len(found) == 1 else None
        stale = not compiling and writes_in_place(func) and flat[0].data_ptr() != tensors[0].data_ptr()
        if place is None or stale:
            raise call.refuse(NOT_BY_TOKEN, advise=False)
        call.args, call.kwargs = replaced(args, tensors, flat), replaced(kwargs, tensors, flat)
        result = self._rule(func, call)(call, *call.args, **call.kwargs)
        outputs = outputs_of(result)
        back = [grid.back(x, place) for x in outputs]
        if any(x is None for x in back):
            raise call.refuse(NOT_BY_TOKEN, advise=False)
        result = replaced(result, outputs, back)
        if not compiling and (routing is not None or func in STARTING):
            self.routing.follow(func, args, kwargs, result)
        return result

    def _rule(self, func: Function, call: InterceptedCall) -> Any:
        rule = vectorized if isinstance(func, Vmapped) else RULES.get(func)
        if rule is None:
            raise call.refuse(_NO_RULE if call.has_met_no_constants() else f"{_NO_RULE}; {_NO_SAMPLES}")
        return rule

    def _derive(self, func: Function, args: Any, kwargs: Any) -> Any:
        cut: dict[Tensor, Source] = {}

        def plain(x: Tensor) -> Tensor:
            if x not in self.sources:
                return x
            detached = x.detach()
            cut[detached] = self.sources[x]
            return detached

        plain_args, plain_kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
        tensors = [] if torch.compiler.is_compiling() else tensors_of((plain_args, plain_kwargs))
        versions = [x._version for x in tensors]  # in compiled code, verification compares instead
        result = func(*plain_args, **plain_kwargs)
        if any(x._version != version for x, version in zip(tensors, versions, strict=True)):
            labels = ", ".join(dict.fromkeys(source.label for source in cut.values()))
            raise self.refusal(labels, func, _IN_PLACE, advise=False)
        for index, output in enumerate(outputs_of(result)):
            if output in cut:
                self.sources[output] = cut[output]  # a cast to its own dtype returns the same tensor
            elif differentiable(output):
                self.sources[output] = derive(func, args, kwargs, self.sources, index, output)
        return result

    @property
    def routing(self) -> Routing:
        """The routes of this forward."""
        if self._routing is None:
            self._routing = Routing(self.slots.batch_size, self._holds_samples, self.context.exchange)
        return self._routing

    def _holds_samples(self, x: Tensor, dim: int, read: bool) -> bool:
        if self.context.grid is not None:
            return x.shape[dim] == self.slots.batch_size
        known = self.layout.get(rows_key(x, dim))
        whole = self.slots.batch_size * self.context.rows_per_unit
        if known is None and read and x.requires_grad and x.shape[dim] == whole:
            raise UnknownCall
        return known is not None and known.inputs[0] is not None

    def _run_routed(self, call: InterceptedCall) -> Any:
        func, args, kwargs = call.func, call.args, call.kwargs
        rule = ROUTED_RULES.get(func) or self._rule(func, call)
        if call.batch_size:
            result = rule(call, *args, **kwargs)
        else:
            args, kwargs = pytree.tree_map_only(Tensor, call.plain, (args, kwargs))
            result = func(*args, **kwargs)
            if self.context.exchange is not None:
                result = call.tap_without_rows(result)
        self.routing.follow(func, args, kwargs, result)
        if any(self.routing.samples(x) is None for x in outputs_of(result)):
            raise call.refuse(ONE_BY_ONE, advise=False)
        return result

    def _unprobed(self, func: Function, tensors: list[Tensor]) -> CallLayout | None:
        data = [x for x in tensors if x not in self.sources]
        if not data and (func in ISOMETRIC or function_name(func) in ISOMETRIC_PROPERTIES):
            return CallLayout([None] * len(tensors), None)
        if not data or any(self.routing.samples(x) is None for x in data):
            return None
        rows = BatchAxis(0, routed=True)
        return CallLayout([None if x in self.sources else rows for x in tensors], rows)


runs_as_python(InterceptionMode.__torch_function__)  # after a graph break, dynamo would compile it alone, and fail
