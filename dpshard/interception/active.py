"""The running forward of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import checkpoint

from dpshard.interception.call import ForwardContext
from dpshard.interception.mode import InterceptionMode
from dpshard.interception.region_facts import facts_of
from dpshard.interception.slots import PreallocatedSlots, RecomputeSlots
from dpshard.rules.modes import without_modes

_BEGIN = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoint, f"{_BEGIN}_impl"):  # torch 2.14
    _BEGIN += "_impl"
"""Name of torch's function that begins activation checkpointing; backward repeats its first argument."""


@dataclass(slots=True)
class _Switch:
    on: bool = False


in_region = _Switch()
"""Process-wide; on while dynamo traces a region. Modules of the region then run without guards of their own."""


@dataclass(slots=True)
class Region:
    """A running compiled region. `tensors` is a list, because dynamo takes dict keys as constants."""

    tensors: list[Tensor]
    facts: str
    """Key of its RegionFacts."""
    batch_size: int
    made: list[tuple[Tensor, ...]]
    """Slots of each row of uses; see [Note: Rows of uses]."""
    context: ForwardContext
    entered: bool = False

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `forward` in a new mode. Dynamo sets no guards on a mode that the trace itself makes."""
        sources, calls, slots = facts_of(self.facts)
        mode = InterceptionMode(
            dict(zip(self.tensors, sources, strict=True)),
            dict(calls),
            PreallocatedSlots(self.batch_size, slots, self.made),
            self.context,
        )
        self.entered = in_region.on = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            self.entered = in_region.on = False


class ActiveForward:
    """The state of one model's forwards."""

    def __init__(self) -> None:
        self.running = False
        self.mode: InterceptionMode | None = None
        self.region: Region | None = None
        self.repeat: Callable[[], AbstractContextManager[Any]] | None = None
        """The context in which checkpointing repeats the latest forward."""

    @contextmanager
    def through(
        self, mode: InterceptionMode, repeat: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> Iterator[None]:
        """Enter `mode` for a forward. Checkpointed functions, which no patched module calls, repeat in `repeat`."""
        before, begin = (self.running, self.mode), getattr(checkpoint, _BEGIN)
        self.running, self.mode = True, mode
        if repeat is not None:

            def begin_in_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                def again(*inputs: Any, **named: Any) -> Any:
                    with repeat():
                        return function(*inputs, **named)

                return begin(again, *args, **kwargs)

            setattr(checkpoint, _BEGIN, begin_in_mode)
        try:
            with mode:
                yield
        finally:
            self.running, self.mode = before
            setattr(checkpoint, _BEGIN, begin)

    def innermost(self) -> InterceptionMode | None:
        """Return the mode of the next call, also after a graph break."""
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, InterceptionMode)]
        return modes[-1] if modes else self.mode

    @contextmanager
    def within(self, region: Region, mode: InterceptionMode) -> Iterator[None]:
        """Leave `mode` while a compiled region runs."""
        before, self.region = self.region, region
        try:
            with without_modes(_get_current_function_mode_stack, _pop_mode, _push_mode, lambda other: other is mode):
                yield
        finally:
            self.region = before

    def recorded(
        self, mode: InterceptionMode, *, repeat_in: AbstractContextManager[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a recorded forward."""

        def repeat() -> AbstractContextManager[Any]:
            stack = ExitStack()
            if repeat_in is not None:
                stack.enter_context(repeat_in)
            # Checkpointed segments may take derived tensors.
            again = mode.with_slots(RecomputeSlots(mode.slots.batch_size))
            stack.enter_context(self.through(again, repeat))
            return stack

        self.repeat = repeat
        return self.through(mode, repeat)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Make forwards ordinary for a block."""
        before = self.running, self.mode, self.repeat
        self.running, self.mode = True, None
        try:
            yield
        finally:
            self.running, self.mode, self.repeat = before
