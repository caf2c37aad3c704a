"""Uses of parameters that every forward repeats.

[Note: Plans of calls]
A call with equal facts repeats an earlier plan, without its rule. Facts are the function, the source of each parameter,
the rank of each other tensor, and every other argument. Each kind of inputs and number of samples has its own plans; a
probe drops all.

Derived parameters, tensor subclasses, torch.func, compiled regions, and packed, picked or exchanged rows have no plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.clipping.autograd_nodes import fused_tap, fuses, hold
from dpshard.clipping.tape import Tape
from dpshard.clipping.uses import Use
from dpshard.interception.batch_dims import Layout
from dpshard.interception.slots import Slots
from dpshard.rules.call import Planned, Source
from dpshard.rules.torch_functions import Function

_TENSORS = frozenset((Tensor, nn.Parameter))
_CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype))
_RANKS = tuple(object() for _ in range(65))
"""Tokens for the ranks of tensors; plain numbers could equal other arguments."""
_MOST = 4096
"""Largest number of plans, because a constant that changes in every forward adds one each time."""


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """A plan with its use."""

    planned: Planned
    use: Use
    operands: tuple[int | str | None, ...]
    """Index or name of the arguments input, weight and bias; None if absent."""
    cuts: tuple[bool, bool]
    """Whether weight and bias are trainable, each."""

    def repeat(self, slots: Slots, args: Any, kwargs: Any) -> Tensor:
        """Run and tap a call as planned."""
        input, weight, bias = [args[p] if type(p) is int else kwargs.get(p) for p in self.operands]
        gradient = self.planned.gradient
        if gradient is not None and isinstance(slots, Tape) and fuses():
            tokens, arrive = slots.expect(self.use)
            return fused_tap(self.planned.run, gradient, input, (weight, bias), tokens, arrive)
        cuts_weight, cuts_bias = self.cuts
        weight, bias = weight.detach() if cuts_weight else weight, bias.detach() if cuts_bias else bias
        output, keep = self.planned.run(hold, input, weight, bias)
        return slots.tap(self.use, output, keep)


class Plans:
    """The plans for one layout and number of samples."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout  # held, so that no other object gets its identity
        self.uses: dict[Function, dict[Any, PlannedUse]] = {}
        self.rehearsals: dict[Any, Any] = {}
        """Rehearsals of compiled regions; see compiled.py."""

    def find(self, func: Function, args: Any, kwargs: Any, sources: Mapping[Tensor, Source]) -> PlannedUse | None:
        """Return the plan of a call."""
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        try:
            return self.uses[func].get(_facts(args, kwargs, sources))
        except TypeError:  # an argument that cannot be hashed, such as a list
            return None

    def keep(
        self,
        func: Function,
        args: Any,
        kwargs: Any,
        sources: Mapping[Tensor, Source],
        planned: Planned,
        operands: tuple[Tensor | None, ...],
    ) -> None:
        """Keep a plan, if equal facts always mean an equal call."""
        named = [*enumerate(args), *kwargs.items()]
        if not all(_is_fact(x, sources) for _, x in named):
            return
        places = tuple(next((p for p, x in named if x is y and y is not None), None) for y in operands)
        _, *cuts = (x is not None and x in sources for x in operands)
        plan = PlannedUse(planned, Use(planned.sources, planned.maker), places, (cuts[0], cuts[1]))
        plans = self.uses.setdefault(func, {})
        if len(plans) == _MOST:
            plans.clear()
        plans[_facts(args, kwargs, sources)] = plan


def _is_fact(x: Any, sources: Mapping[Tensor, Source]) -> bool:
    if type(x) in _TENSORS:
        source = sources.get(x)
        return source is None or source.roots == (source.label,)  # each forward derives tensors anew
    return type(x) in _CONSTANTS or (type(x) is tuple and all(type(i) in _CONSTANTS for i in x))


def _facts(args: Any, kwargs: Any, sources: Mapping[Tensor, Source]) -> tuple[Any, ...]:
    facts = [sources.get(x) or _RANKS[x.dim()] if type(x) in _TENSORS else x for x in args]
    if kwargs:
        facts += kwargs
        facts += [sources.get(x) or _RANKS[x.dim()] if type(x) in _TENSORS else x for x in kwargs.values()]
    return tuple(facts)
