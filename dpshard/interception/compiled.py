"""Compiled regions: calls of compiled modules, to which slots are inputs like any other; see [Note: Anchor, slot, tap].

Slots are made before a region is entered; a rehearsal in eager mode, without gradients, tells which it will ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.clipping.tape import Use
from dpshard.interception.isolation import IsolatedForward, eager
from dpshard.interception.running import ActiveMode
from dpshard.interception.slots import PreallocatedSlots, SlotRecorder
from dpshard.rules.torch_functions import Quiet

if TYPE_CHECKING:
    from dpshard.interception.patching import Interception


class CompiledRegions:
    """The compiled modules of a model, and what each asks for, by the kind of its inputs."""

    def __init__(self, owner: Interception) -> None:
        self.owner = owner
        self._rehearsals: dict[Any, list[tuple[Use, tuple[Tensor, ...]]]] = {}

    def call(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Call a compiled module with slots that were made for it."""
        if self.owner.sharding.gathers(module):
            with Quiet.set(True):  # what is compiled comes after the hooks, and so do its slots
                return original(*args, **kwargs)
        with self.slots_for(module, original, args, kwargs):
            return original(*args, **kwargs)

    @contextmanager
    def slots_for(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """A block in which a compiled region finds its slots ready; a rehearsal tells which it needs."""
        mode = self.owner.mode
        assert mode is not None
        if isinstance(mode.slots, SlotRecorder):
            with eager():
                yield
            return
        leaves, tree = pytree.tree_flatten((args, kwargs))
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else _constant(x) for x in leaves)
        devices = {x.device.type for x in leaves if isinstance(x, Tensor)}
        key = (module, tree, shapes, any(torch.is_autocast_enabled(device) for device in devices))
        if key not in self._rehearsals:
            rehearsal = SlotRecorder(mode.slots.batch_size, [])
            rehearsing = self.owner.new_mode(mode.layout, rehearsal, mode.sources)
            with IsolatedForward(self.owner, module), torch.no_grad(), ActiveMode(self.owner, rehearsing):
                original(*args, **kwargs)
            self._rehearsals[key] = rehearsal.asked
        maker = mode.slots
        made = []
        for use, noted in self._rehearsals[key]:
            labels = tuple([source.label for source in use.sources])
            made.append((labels, maker.slot(use, *self._templates(use, noted, maker.batch_size))))
        outside = mode.sources
        entering = {x: outside[x] for x in leaves if isinstance(x, Tensor) and x in outside}
        own = set(module.parameters())
        # Dynamo prints what it guards on, and may not read what is freed meanwhile.
        readable = {
            x: source
            for x, source in self.owner.trainable().items()
            if x in own or source.label not in self.owner.freed
        }
        mode.slots, mode.sources = PreallocatedSlots(maker.batch_size, made), {**readable, **entering}
        try:
            yield
        finally:
            outside.update(mode.sources)
            mode.slots, mode.sources = maker, outside

    def _templates(self, use: Use, noted: tuple[Tensor, ...], batch_size: int) -> tuple[Tensor, ...]:
        if not use.copies:
            return noted
        # Parameters have moved since the rehearsal.
        with torch.no_grad():
            value = use.sources[0].replay({source.label: x for x, source in self.owner.sources.items()})
        value = value.detach().to(noted[0].dtype)  # replays leave casts out
        return (value.unsqueeze(0).expand(batch_size, *value.shape),)


def _constant(x: Any) -> Any:
    return x if isinstance(x, (bool, int, float, str, bytes, type(None))) else type(x)
