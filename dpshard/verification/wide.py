"""Repeat a failed comparison in float64: differences by rounding shrink, and those by a fault stay.

Other ranks may have no failure. So a collective in forward ends the repetition, and the failure counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpshard.clipping.tape import Clipper
from dpshard.verification.repeated_call import RepeatedCall


@dataclass(slots=True)
class Widened:
    """Parameters in float64, by name."""

    parameters: dict[str, nn.Parameter]

    def tensors_of(self, name: str) -> Sequence[Tensor]:
        """Return the tensors that forwards use for a parameter."""
        return [self.parameters[name]]


class OnOneRank(TorchDispatchMode):
    """Raises RuntimeError where forward calls a collective."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator unless it is a collective."""
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func.__name__} waits for other ranks, which may not come.")
        return func(*args, **(kwargs or {}))


class Doubled(TorchFunctionMode):
    """Casts to float64 where a model casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function with float64 for float32."""
        if func is Tensor.float:
            func = Tensor.double
        return func(*(_wider_dtype(x) for x in args), **{name: _wider_dtype(x) for name, x in (kwargs or {}).items()})


def can_widen(repeated: RepeatedCall, owned: Any) -> bool:
    """Return True if parameters are whole, and autocast does not choose float32."""
    model = repeated.replay.parameters.model
    plain = all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    unshards = repeated.replay.parameters.unshards(repeated.run.module)
    return plain and not unshards and owned.differentiated is owned.parameters and not repeated.half


@contextmanager
def widened(repeated: RepeatedCall, clipper: Clipper) -> Iterator[tuple[RepeatedCall, Widened, Clipper]]:
    """Return a block in which the model computes in float64."""
    owned, layouts = repeated.replay.parameters, repeated.replay.layouts
    model, sources = owned.model, owned.sources
    wide: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
    ]
    buffers = [b for b in model.buffers() if b.dtype == torch.float32]
    added, run = None, repeated.run
    try:
        for module, name, p in places:
            if p not in wide:
                wide[p] = nn.Parameter(p.detach().double(), requires_grad=p.requires_grad)
            if p in sources:
                sources[wide[p]] = sources[p]
            setattr(module, name, wide[p])
        for buffer in buffers:
            buffer.data = buffer.data.double()
        parameters = {sources[p].label: wide[p] for p in wide if p in sources}
        leaves = tuple(_double(x) for x in repeated.run.leaves)
        loss = repeated.loss
        if loss is not None:
            loss = replace(loss, targets=tuple(_double(t) for t in loss.targets))
        values: dict[str, Tensor] = dict(parameters)
        in_double = replace(repeated, run=replace(repeated.run, leaves=leaves), loss=loss)
        key = layouts.key(in_double.run)
        if key not in layouts.found:
            layouts.found[key] = layouts.of(run)
            added = key
        with Doubled():
            yield in_double, Widened(parameters), clipper.with_values(values)
    finally:
        if added is not None:
            del layouts.found[added]
        for module, name, p in places:
            setattr(module, name, p)
        for p in wide.values():
            sources.pop(p, None)
        for buffer in buffers:
            buffer.data = buffer.data.float()


def _wider_dtype(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def _double(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x
