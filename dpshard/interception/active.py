"""The forward of a model that is running now, if any: patched modules read it, and `ActiveForward` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from dpshard.interception.mode import InterceptionMode
from dpshard.interception.slots import RecomputeSlots


class ActiveForward:
    """State of one model: modules that are called while a forward is running run as they are."""

    def __init__(self) -> None:
        self.running = False
        self.mode: InterceptionMode | None = None
        """The mode of the running forward; None if that forward is an ordinary one."""
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
