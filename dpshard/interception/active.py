"""The forward of a model that is running now, if any: patched modules read it, and `ActiveForward` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from dpshard.interception.batch_dims import Layout
from dpshard.interception.call import Refusal
from dpshard.interception.mode import InterceptionMode
from dpshard.interception.slots import RecomputeSlots, Slots
from dpshard.rules.call import Source


@dataclass(slots=True)
class Region:
    """A compiled region that runs now: what its mode is made of, in lists, because dynamo takes a key for constant."""

    tensors: list[Tensor]
    sources: list[Source]
    """What the tensors are."""
    layout: Layout
    slots: Slots
    refusal: Refusal
    rows_per_unit: int
    entered: bool = False

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `forward` through a mode that is made here, where dynamo traces: it guards on nothing of such a mode."""
        mode = InterceptionMode(
            dict(zip(self.tensors, self.sources, strict=True)),
            self.layout,
            self.slots,
            self.refusal,
            self.rows_per_unit,
        )
        self.entered = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            self.entered = False


class ActiveForward:
    """State of one model: modules that are called while a forward is running run as they are."""

    def __init__(self) -> None:
        self.running = False
        self.mode: InterceptionMode | None = None
        """The mode of the running forward; None if that forward is an ordinary one."""
        self.region: Region | None = None
        """The compiled region that runs; None outside."""
        self.repeat: Callable[[], AbstractContextManager[Any]] | None = None
        """Makes the context in which checkpointing repeats a part of the latest forward; None if none may repeat."""

    @contextmanager
    def through(self, mode: InterceptionMode) -> Iterator[None]:
        """Enter `mode` for a forward."""
        before = self.running, self.mode
        self.running, self.mode = True, mode
        try:
            with mode:
                yield
        finally:
            self.running, self.mode = before

    def innermost(self) -> InterceptionMode | None:
        """Return the mode that calls go through now: of a region that broke into several graphs, the region's."""
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, InterceptionMode)]
        return modes[-1] if modes else self.mode

    @contextmanager
    def within(self, region: Region, mode: InterceptionMode) -> Iterator[None]:
        """Leave `mode` for a compiled region, which has one of its own."""
        before, self.region = self.region, region
        try:
            with _left(mode):
                yield
        finally:
            self.region = before

    def recorded(
        self, mode: InterceptionMode, *, beside: AbstractContextManager[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a recorded forward through `mode`, which checkpointing may repeat.

        The repetition has slots that lead nowhere. It runs inside of `beside`, too.
        """

        def repeat() -> AbstractContextManager[Any]:
            stack = ExitStack()
            if beside is not None:
                stack.enter_context(beside)
            # A segment gets what the forward derived before it as arguments: the mode keeps these sources.
            stack.enter_context(self.through(mode.with_slots(RecomputeSlots(mode.slots.batch_size))))
            return stack

        self.repeat = repeat
        return self.through(mode)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Make forwards ordinary ones, and restore the state afterwards."""
        before = self.running, self.mode, self.repeat
        self.running, self.mode = True, None
        try:
            yield
        finally:
            self.running, self.mode, self.repeat = before


@contextmanager
def _left(mode: InterceptionMode) -> Iterator[None]:
    """Take `mode` off the stack of function modes; those of the user above it stay."""
    if mode not in _get_current_function_mode_stack():
        yield
        return
    above: list[Any] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        _push_mode(mode)
        for other in reversed(above):
            _push_mode(other)
