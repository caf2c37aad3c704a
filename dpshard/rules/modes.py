"""Switches for torch's modes, which see calls of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_modes(
    stack: Callable[[], Any], pop: Callable[[], Any], push: Callable[[Any], Any], is_left: Callable[[Any], bool]
) -> Iterator[None]:
    """Leave the modes for which `is_left(mode)` holds in a block. `stack`, `pop` and `push` are torch's functions."""
    taken: list[Any] = []
    while any(map(is_left, stack())):
        taken.append(pop())
    others = [mode for mode in reversed(taken) if not is_left(mode)]
    for mode in others:
        push(mode)
    try:
        yield
    finally:
        for _ in others:
            pop()
        for mode in reversed(taken):
            push(mode)


class Passthrough:
    """A process-wide switch. While it is on, because a framework gathers or frees parameters, modes change no call."""

    on = False

    @classmethod
    @contextmanager
    def set(cls, on: bool) -> Iterator[None]:
        """Set the switch in a block."""
        before, cls.on = cls.on, on
        try:
            yield
        finally:
            cls.on = before
