"""Compiled regions: calls of compiled modules, to which slots are inputs like any other.

Slots are made before a region is entered. A rehearsal in eager mode, without gradients, tells which slots a region
uses. See [Note: Anchor, slot, tap] in autograd_nodes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.clipping.tape import Use
from dpshard.interception.active import ActiveForward
from dpshard.interception.isolation import Isolate, eager
from dpshard.interception.parameters import TrainedParameters
from dpshard.interception.slots import PreallocatedSlots, SlotRecorder
from dpshard.rules.torch_functions import Passthrough


class CompiledRegions:
    """The compiled modules of a model, and the slots that each uses, by the kind of its inputs."""

    def __init__(self, parameters: TrainedParameters, active: ActiveForward, isolate: Isolate) -> None:
        self._parameters, self._active, self._isolate = parameters, active, isolate
        self._rehearsals: dict[Any, list[tuple[Use, tuple[Tensor, ...]]]] = {}

    def call(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Call a compiled module with slots that were made for it."""
        if self._parameters.unshards(module):
            with Passthrough.set(True):  # the compiled code comes after the hooks, and so do its slots
                return original(*args, **kwargs)
        with self.slots_for(module, original, args, kwargs):
            return original(*args, **kwargs)

    @contextmanager
    def slots_for(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Make the slots of a compiled region before it runs."""
        mode = self._active.mode
        assert mode is not None
        if mode.slots.rehearses:
            with eager():
                yield
            return
        leaves, tree = pytree.tree_flatten((args, kwargs))
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else _constant(x) for x in leaves)
        devices = {x.device.type for x in leaves if isinstance(x, Tensor)}
        key = (module, tree, shapes, any(torch.is_autocast_enabled(device) for device in devices))
        if key not in self._rehearsals:
            rehearsal = SlotRecorder(mode.slots.batch_size, [])
            rehearsing = mode.with_slots(rehearsal)
            with self._isolate(module), torch.no_grad(), self._active.through(rehearsing):
                original(*args, **kwargs)
            self._rehearsals[key] = rehearsal.asked
        maker = mode.slots
        made = []
        for use, noted in self._rehearsals[key]:
            labels = tuple([source.label for source in use.sources])
            made.append((labels, maker.slot(use, *self._templates(use, noted, maker.batch_size))))
        entering = {x: mode.sources[x] for x in leaves if isinstance(x, Tensor) and x in mode.sources}
        own = set(module.parameters())
        # Dynamo prints what it guards on, and must not read a parameter that is freed meanwhile.
        readable = {
            x: source
            for x, source in self._parameters.trainable().items()
            if x in own or source.label not in self._parameters.temporary
        }
        slots = PreallocatedSlots(maker.batch_size, made)
        with mode.in_region(slots, {**readable, **entering}), _taken_once_under_checkpoints():
            yield

    def _templates(self, use: Use, noted: tuple[Tensor, ...], batch_size: int) -> tuple[Tensor, ...]:
        if not use.copies:
            return noted
        # Parameters have moved since the rehearsal.
        with torch.no_grad():
            value = use.sources[0].replay(self._parameters.values())
        value = value.detach().to(noted[0].dtype)  # replays leave casts out
        return (value.unsqueeze(0).expand(batch_size, *value.shape),)


@contextmanager
def _taken_once_under_checkpoints() -> Iterator[None]:
    """Let dynamo trace checkpoints that take slots: what backward recomputes of them needs none."""
    config = torch._dynamo.config  # its patch() is ten times as slow
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    try:
        yield
    finally:
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = before


def _constant(x: Any) -> Any:
    return x if isinstance(x, (bool, int, float, str, bytes, type(None))) else type(x)
