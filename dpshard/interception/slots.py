"""Slots, which record the uses of parameters: those of the tape, or stand-ins for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from dpshard.clipping.autograd_nodes import dummies_like, tap
from dpshard.clipping.checkpointing import unseen
from dpshard.clipping.region import Asked, Row
from dpshard.clipping.uses import Use
from dpshard.errors import REENTRANT, UnsupportedParameterError


class Slots(Protocol):
    """Records the uses of parameters."""

    batch_size: int
    compiled: bool
    """True for a compiled region or its rehearsal."""
    rehearses: bool
    """True if the forward only counts uses."""

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`. In backward, its gradient and `keep` become records."""
        ...

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return tensors like `templates`, whose gradients become the records of `use`; see Tape.slot."""
        ...

    def region(self, rows: Sequence[Row]) -> list[tuple[Tensor, ...]]:
        """Return the slots of a compiled region, for each row of uses."""
        return [self.slot(row.uses[0], *row.templates) for row in rows]


class RecomputeSlots(Slots):
    """Slots of a forward that checkpointing repeats; they refuse backward."""

    compiled: bool = False
    rehearses: bool = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        with unseen():
            self._token = torch.zeros(0, requires_grad=True)

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`, which refuses backward."""
        return tap(output, keep, (self._token,), _refuse)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return copies of `templates`, which refuse backward."""
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
    """Lists the slots that a region asks for."""

    batch_size: int
    asked: list[tuple[Use, tuple[Tensor, ...]]]
    compiled: bool = True
    rehearses: bool = True

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Note the use."""
        self.slot(use, *dummies_like(output, keep))
        return output

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Note the use."""
        self.asked.append((use, templates))
        return templates


class PreallocatedSlots(Slots):
    """Gives a compiled region its premade slots.

    The trace makes this object, because a graph would return an object that was made outside.
    """

    compiled: bool = True
    rehearses: bool = False

    def __init__(self, batch_size: int, facts: str, made: list[tuple[Tensor, ...]]) -> None:
        """Take the facts of the slots and their tensors, by row of uses."""
        self.batch_size = batch_size
        self._made = _cut(facts, made)
        self._taken = 0

    def tap(self, use: Use, output: Tensor, keep: tuple[Tensor, ...]) -> Tensor:
        """Return `output`; `keep` and its gradient leave the region as gradients of a slot."""
        return tap(output, keep, self.slot(use), None)

    def slot(self, use: Use, *templates: Tensor) -> tuple[Tensor, ...]:
        """Return the next slot. Raises UnsupportedParameterError if it was made for another use."""
        facts, tensors = self._made[self._taken] if self._taken < len(self._made) else ([], ())
        self._taken += 1
        if facts != [use.call, *[source.label for source in use.sources]]:
            raise UnsupportedParameterError(ANOTHER_COURSE)
        return tuple(tensors)


_PARTS, _USES, _ITEMS = "\x1d", "\x1e", "\x1f"
"""Separators that labels, which have commas and slashes, do not contain."""


def slot_facts(asked: Asked, rows: Sequence[Sequence[int]], dims: Sequence[int]) -> str:
    """Return the call and labels of each use, and the dimension and uses of each row.

    The result is one string, because dynamo takes no tuple for a constant.
    """
    labels = _USES.join(_ITEMS.join([use.call, *[source.label for source in use.sources]]) for use, _ in asked)
    places = _USES.join(_ITEMS.join(map(str, (dim, *row))) for dim, row in zip(dims, rows, strict=True))
    return labels + _PARTS + places


def _cut(facts: str, made: Sequence[Sequence[Tensor]]) -> list[tuple[list[str], Sequence[Tensor]]]:
    if not made:
        return []
    labels, places = facts.split(_PARTS)
    by_use: dict[int, Sequence[Tensor]] = {}
    for row, tensors in zip(places.split(_USES), made, strict=True):
        dim, *uses = map(int, row.split(_ITEMS))
        if len(uses) == 1:
            by_use[uses[0]] = tensors
        else:
            parts = [x.chunk(len(uses), dim) for x in tensors]
            for i, use in enumerate(uses):
                by_use[use] = [part[i] for part in parts]
    return [(some.split(_ITEMS), by_use[i]) for i, some in enumerate(labels.split(_USES))]


ANOTHER_COURSE = (
    "A compiled region uses other parameters than before, or the same ones in another order, with the same inputs: a "
    "global that selects its path has changed. Make it an argument of the call (a bool or a str), or compile only the "
    "parts that do not depend on it."
)
