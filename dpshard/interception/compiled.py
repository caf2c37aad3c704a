"""Calls of compiled modules, which take slots as inputs.

A rehearsal, which is a forward in eager mode, shows which slots they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.clipping.region import Asked, Row, form_rows, rows_of
from dpshard.clipping.uses import Use
from dpshard.interception.active import ActiveForward, Region
from dpshard.interception.attributes import Attributes
from dpshard.interception.batch_dims import CallKey, CallLayout
from dpshard.interception.call import Refusal
from dpshard.interception.held_objects import PLAIN, is_foreign
from dpshard.interception.isolation import Isolate, eager
from dpshard.interception.kinds import contents_of
from dpshard.interception.mode import InterceptionMode
from dpshard.interception.numbered import NumberedLayout, NumberedSources, Numbering
from dpshard.interception.parameters import TrainedParameters
from dpshard.interception.region_facts import RegionFacts, key_of
from dpshard.interception.slots import SlotRecorder, slot_facts
from dpshard.names import parameters_of
from dpshard.rules.call import Source
from dpshard.rules.modes import Passthrough

_DEEPEST, _MOST_HELD = 4, 64


@dataclass(frozen=True, slots=True)
class _Known:
    tensors: list[Tensor]
    facts: str
    trained: object
    """Identity of the mode's set of trainable parameters; see InterceptionMode."""
    among: int


@dataclass(slots=True)
class _Rehearsed:
    numbering: Numbering
    calls: Sequence[tuple[CallKey, CallLayout]]
    slots: str
    """Text of `slot_facts`; like `calls`, with numbered sources. See RegionFacts."""
    outside: Asked
    """The slots that the rehearsal asked for, with named sources."""
    places: list[list[int]]
    """Indices of the uses of each row; see [Note: Rows of uses]."""
    rows: list[Row]
    refusal: Refusal
    copies: bool
    """True if a template holds per-sample copies of its source."""
    trained: list[str]
    """Labels of the sources among the region's tensors; freezing a parameter removes its label."""
    attributes: Attributes
    """Attributes that the region may read."""
    known: _Known | None = None

    def known_again(self, mode: InterceptionMode, leaves: list[Any]) -> _Known | None:
        known, sources = self.known, mode.sources
        if known is None or known.trained is not mode.trained or known.among != len(sources):
            return None
        return None if any(isinstance(x, Tensor) and x in sources for x in leaves) else known


class CompiledRegions:
    """The compiled modules of a model, with their slots."""

    def __init__(self, parameters: TrainedParameters, active: ActiveForward, isolate: Isolate) -> None:
        self._parameters, self._active, self._isolate = parameters, active, isolate

    def call(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Call a compiled module with its slots."""
        if self._parameters.unshards(module):
            with Passthrough.set(True):  # hooks that gather parameters must run before slots are made
                return original(*args, **kwargs)
        with self.slots_for(module, original, args, kwargs):
            return original(*args, **kwargs)

    @contextmanager
    def slots_for(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Make the slots of a compiled region."""
        mode = self._active.innermost()
        assert mode is not None
        if mode.slots.rehearses:
            with eager():
                yield
            return
        leaves, tree = pytree.tree_flatten((args, kwargs))
        inputs = tuple([_fact(x, mode.sources) if isinstance(x, Tensor) else _constant(x) for x in leaves])
        devices = {x.device.type for x in leaves if isinstance(x, Tensor)}
        autocast = any(torch.is_autocast_enabled(device) for device in devices)
        key = (module, tree, inputs, mode.context.grid, mode.slots.batch_size, autocast)
        outer = self._active.mode  # of the whole model; the innermost mode may be that of an enclosing region
        assert outer is not None
        assert outer.rehearsals is not None
        region = outer.rehearsals.get(key)
        if region is not None and not region.attributes.are_unchanged():
            region = None
        if region is None or (known := region.known_again(mode, leaves)) is None:
            tensors = [*(p for _, p in parameters_of(module)), *leaves]
            first = [x for x in tensors if isinstance(x, Tensor) and x in mode.sources]
            if region is None or region.trained != [mode.sources[x].label for x in first]:
                region = self._rehearse(module, functools.partial(original, *args, **kwargs), mode, first)
                outer.rehearsals[key] = region
            known = self._known(region, mode, first)
        rows = region.rows
        if region.copies and not mode.slots.compiled:
            rows = form_rows(self._with_values(region.outside, mode.slots.batch_size), region.places)
        made = mode.slots.region(rows)
        context = replace(mode.context, refusal=region.refusal)
        inner = Region(known.tensors, known.facts, mode.slots.batch_size, made, context)
        with self._active.within(inner, mode), _taken_once_under_checkpoints():
            yield

    def _rehearse(
        self, module: nn.Module, forward: Callable[[], Any], mode: InterceptionMode, first: list[Tensor]
    ) -> _Rehearsed:
        numbering, recorder = Numbering(), SlotRecorder(mode.slots.batch_size, [])
        layout = NumberedLayout(numbering, mode.layout)
        for x in first:
            numbering.number(mode.sources[x])
        trained = [mode.sources[x].label for x in first]
        refusal = _renaming(mode.refusal, numbering)
        rehearsing = InterceptionMode({}, layout, recorder, replace(mode.context, refusal=refusal))
        rehearsing.sources = NumberedSources(numbering, mode.sources)
        attributes = Attributes(module)
        # With gradients, because forward may turn them off for a part. Nothing is saved, because no backward follows.
        unsaved = torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
        with self._isolate(module), torch.enable_grad(), unsaved, self._active.through(rehearsing):
            forward()
            attributes.leave_out_changed()
        outside = [(numbering.name_use(use), templates) for use, templates in recorder.asked]
        places = rows_of(outside, self._parameters.by_name)
        rows = form_rows(outside, places)
        copies = any(use.copies for use, _ in outside)
        slots = slot_facts(recorder.asked, places, [row.dim for row in rows])
        calls = (*layout.items(),)
        return _Rehearsed(numbering, calls, slots, outside, places, rows, refusal, copies, trained, attributes)

    def _known(self, region: _Rehearsed, mode: InterceptionMode, first: list[Tensor]) -> _Known:
        numbering = region.numbering
        known = {x: numbering.number(mode.sources[x]) for x in first}
        lasting = len(numbering.names) == len(known)
        if not lasting:
            for x, source in mode.sources.items():
                # Dynamo prints its guards, and must not read a freed parameter.
                if numbering.knows(source) and source.label not in self._parameters.temporary:
                    known.setdefault(x, numbering.number(source))
        facts = RegionFacts((*known.values(),), region.calls, region.slots)
        found = _Known([*known], key_of(facts), mode.trained, len(mode.sources))
        lasting = lasting and mode.trained is not None and known.keys() <= mode.trained.keys()
        region.known = found if lasting else None
        return found

    def _with_values(self, asked: Asked, batch_size: int) -> Asked:
        values = self._parameters.values()

        def templates(use: Use, noted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if not use.copies:
                return noted
            with torch.no_grad():
                value = use.sources[0].recompute(values)
            value = value.detach().to(noted[0].dtype)
            return (value.unsqueeze(0).expand(batch_size, *value.shape),)

        return [(use, templates(use, noted)) for use, noted in asked]


def _renaming(refusal: Refusal, numbering: Numbering) -> Refusal:

    def renamed(labels: str, func: Any, reason: str, *, advise: bool = True) -> Exception:
        return refusal(numbering.name_all(labels), func, reason, advise=advise)

    return renamed


@contextmanager
def _taken_once_under_checkpoints() -> Iterator[None]:
    config = torch._dynamo.config  # patch() is ten times as slow
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    try:
        yield
    finally:
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = before


def _nothing(_: Any) -> Any: ...


def _fact(x: Tensor, sources: Mapping[Tensor, Source]) -> Any:
    return (x.shape, x.dtype, x.is_contiguous(), sources[x].label if x in sources else None)


def _constant(x: Any, depth: int = 0) -> Any:
    """Return what must stay equal to reuse a rehearsal: values, shapes, contents of objects, and code of functions."""
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, (*PLAIN, Enum)):
        return type(x), x
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    if isinstance(x, (nn.Module, BuiltinFunctionType)):
        return x
    if isinstance(x, MethodType):
        return _constant(x.__func__, depth + 1), _constant(x.__self__, depth + 1)
    known = (dict, list, tuple, FunctionType, functools.partial)
    held = contents_of(x) if isinstance(x, known) or not is_foreign(type(x).__module__) else None
    kind = x.__code__ if isinstance(x, FunctionType) else type(x)
    if depth == _DEEPEST or held is None or len(held) > _MOST_HELD:
        return kind
    return kind, tuple([(str(name), _constant(item, depth + 1)) for name, item in held.items()])
