"""Where rules get their slots from when it is not the tape itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import Arrive
from dpshard.clipping.tape import Use
from dpshard.errors import REENTRANT, UnsupportedParameterError


class SlotMaker(Protocol):
    """Where a rule gets its slots from: the tape, or a stand-in for it."""

    batch_size: int

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """See Tape.slot."""
        ...

    def expect(self, use: Use) -> tuple[Sequence[Tensor], Arrive] | None:
        """See Tape.expect; None in a compiled region, where slots alone lead to the tape."""
        ...


class RecomputeSlots:
    """Slots for a module that checkpointing runs again: they lead nowhere, unless checkpointing is reentrant."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Stand-ins that refuse to be differentiated."""
        return _Refusing.apply(torch.zeros(0, requires_grad=True), *templates)

    def expect(self, use: Use) -> tuple[Sequence[Tensor], Arrive]:
        """What takes no records; outputs get a graph as they had at first, where nothing else gives them one."""
        return (torch.zeros(0, requires_grad=True),), _refuse


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *templates: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in templates)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _refuse()


def _refuse(*_: Any) -> NoReturn:
    raise UnsupportedParameterError(REENTRANT)


@dataclass(slots=True)
class SlotRecorder:
    """Notes which slots a compiled region will ask for."""

    batch_size: int
    asked: list[tuple[Use, tuple[Tensor, ...]]]

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Note the request; gradients are off, so the templates themselves will do."""
        self.asked.append((use, templates))
        return templates

    def expect(self, use: Use) -> None:
        """None: see SlotMaker."""


class PreallocatedSlots:
    """Hands a compiled region the slots that were made for it, in order."""

    def __init__(self, batch_size: int, slots: list[tuple[tuple[str, ...], tuple[Tensor, ...]]]) -> None:
        self.batch_size = batch_size
        self.slots = slots
        """The labels of the sources of each use, and its tensors."""

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """The next slot; UnsupportedParameterError if it was made for another use."""
        labels, tensors = self.slots.pop(0) if self.slots else ((), ())
        if labels != tuple([source.label for source in use.sources]):
            raise UnsupportedParameterError(ANOTHER_COURSE)
        return tensors

    def expect(self, use: Use) -> None:
        """None: see SlotMaker."""


ANOTHER_COURSE = (
    "A compiled region uses other parameters than it did with the same inputs before: an attribute that switches its "
    "course has changed. Make it an argument of the call (a bool or a str), or compile the parts that do not switch."
)
