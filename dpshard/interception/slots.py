"""Where rules record the uses of parameters: on the tape, or on what stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import dummies_like, tap
from dpshard.clipping.checkpointing import unseen
from dpshard.clipping.tape import Use
from dpshard.errors import REENTRANT, UnsupportedParameterError


class Slots(Protocol):
    """Records the uses of parameters in one forward: the tape, or a stand-in for it."""

    batch_size: int
    compiled: bool
    """Whether the forward is that of a compiled region, or its rehearsal: the tape is out of its reach."""
    rehearses: bool
    """Whether the forward only counts uses, so that it records under torch.no_grad(), too."""

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; in backward `keep` and its gradient become the records of `use`."""
        ...

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """See Tape.slot."""
        ...

    def region(self, asked: Sequence[tuple[Use, tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
        """Return the slots of all uses of a compiled region; given with each use are its templates."""
        return [self.slot(use, *templates) for use, templates in asked]


class RecomputeSlots(Slots):
    """Slots for a module that checkpointing runs again: they lead nowhere, unless checkpointing is reentrant."""

    compiled: bool = False
    rehearses: bool = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        with unseen():
            self._token = torch.zeros(0, requires_grad=True)

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output` with a graph, as it had at first, which refuses to be differentiated."""
        return tap(output, keep, (self._token,), _refuse)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return stand-ins that refuse to be differentiated."""
        return _Refusing.apply(self._token, *templates)


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
class SlotRecorder(Slots):
    """Notes which slots a compiled region uses."""

    batch_size: int
    asked: list[tuple[Use, tuple[Tensor, ...]]]
    compiled: bool = True
    rehearses: bool = True

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Note the tensors that would arrive; the output is enough, because gradients are off."""
        self.slot(use, *dummies_like(output, keep))
        return output

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Note the use; the templates are enough, because gradients are off."""
        self.asked.append((use, templates))
        return templates


class PreallocatedSlots(Slots):
    """Hands a compiled region the slots that were made for it, in order."""

    compiled: bool = True
    rehearses: bool = False

    def __init__(self, batch_size: int, made: list[tuple[tuple[str, ...], tuple[Tensor, ...]]]) -> None:
        self.batch_size = batch_size
        self.made = made
        """The labels of the sources of each use, and its tensors."""
        self._taken = 0

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; `keep` and its gradient leave the region as the gradients of a slot."""
        return tap(output, keep, self.slot(use), None)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return the next slot; UnsupportedParameterError if it was made for another use."""
        labels, tensors = self.made[self._taken] if self._taken < len(self.made) else ((), ())
        self._taken += 1
        if labels != tuple([source.label for source in use.sources]):
            raise UnsupportedParameterError(ANOTHER_COURSE)
        return tensors


ANOTHER_COURSE = (
    "A compiled region uses other parameters than it did with the same inputs before: an attribute that switches its "
    "course has changed. Make it an argument of the call (a bool or a str), or compile the parts that do not switch."
)
