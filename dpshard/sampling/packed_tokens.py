"""Rows of packed samples: the unit of every token.

[Note: Packed rows] A stream [R, T] holds whole units (documents) one after another. Tokens of no unit are padding.
Units of a micro-batch have the numbers 0, ..., U - 1. U, R and T are public, so shapes do not depend on the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from dpshard.errors import BatchLayoutError

NO_UNIT = -1
"""Unit id of padding."""


@dataclass(frozen=True)
class PackedTokens:
    """The unit of every token of a stream [R, T].

    Raises BatchLayoutError unless each unit is one run of tokens in one row.
    """

    unit_ids: Tensor
    """int64 [R, T]: 0, ..., U - 1, or negative for padding. [T] becomes [1, T]."""
    units: int
    """U."""
    samples: int | None = None
    """Number of units that are not padding, which come first; None: units with tokens."""
    everywhere: int | None = None
    """Units that every rank has in this micro-batch, if known."""
    planned_beside: bool | None = None
    """True if a row of some rank holds several units, if known."""
    given: tuple[Tensor, ...] = field(default=(), compare=False)
    """Other tensors [R, T] of the micro-batch."""

    def __post_init__(self) -> None:
        ids = self.unit_ids
        if isinstance(ids, Tensor) and ids.dim() == 1:
            ids = ids[None]
        if not _is_whole(ids) or ids.dim() != 2 or ids.numel() == 0:
            raise BatchLayoutError(
                "unit_ids must be a tensor of whole numbers [R, T] or [T]: the unit of every token, and -1 for "
                "padding. dpshard.packed_unit_ids makes it of position_ids or cu_seqlens."
            )
        if type(self.units) is not int or self.units < 1 or int(ids.max()) >= self.units:
            raise BatchLayoutError(
                f"unit_ids has ids up to {int(ids.max())}, and there are units={self.units}. Number the units of a "
                f"micro-batch 0, 1, ..., and give as `units` the most that a micro-batch may have: a public number."
            )
        if ids.shape[0] == ids.shape[1] > 1:
            raise BatchLayoutError(
                f"unit_ids has shape {tuple(ids.shape)}, so rows and tokens cannot be told apart in the model. Choose "
                f"another number of rows."
            )
        object.__setattr__(self, "unit_ids", ids.detach().clone())  # a loop may refill its tensor
        self._refuse_parts()

    def _refuse_parts(self) -> None:
        seen: dict[int, int] = {}
        for unit, row, _, _ in self.runs:
            if seen.setdefault(unit, row) != row:
                raise BatchLayoutError(
                    f"Unit {unit} straddles rows {seen[unit]} and {row}, so attention sees only parts of it. Keep each "
                    f"unit in one row; dpshard.Packing does."
                )
        if len(seen) < len(self.runs):
            unit = next(unit for i, (unit, *_) in enumerate(self.runs) if unit in {u for u, *_ in self.runs[:i]})
            raise BatchLayoutError(
                f"The tokens of unit {unit} are not side by side in row {seen[unit]}. Give every unit one run of "
                f"tokens, and every document an id of its own."
            )

    @cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """Unit, row, first token and end of every run of tokens of a unit, in their order."""
        ids = self.unit_ids.detach().to("cpu", torch.int64)
        found = []
        for row, of_row in enumerate(ids):
            units, counts = torch.unique_consecutive(of_row, return_counts=True)
            ends = counts.cumsum(0).tolist()
            found += [
                (unit, row, start, end)
                for unit, start, end in zip(units.tolist(), [0, *ends[:-1]], ends, strict=True)
                if unit >= 0
            ]
        return found

    @cached_property
    def places(self) -> dict[int, tuple[int, int, int]]:
        """Row, first token and end of every unit."""
        return {unit: (row, start, end) for unit, row, start, end in self.runs}

    @cached_property
    def side_by_side(self) -> bool:
        """True if a row holds several units; the rows of all ranks count if they are known."""
        beside = len({row for _, row, _, _ in self.runs}) < len(self.runs)
        return beside if self.planned_beside is None else self.planned_beside

    def before(self, unit: int) -> bool:
        """Return True if another unit lies before this one in its row."""
        row, start, _ = self.places[unit]
        return any(r == row and begin < start for _, r, begin, _ in self.runs)

    @property
    def shape(self) -> tuple[int, int]:
        """R and T."""
        return self.unit_ids.shape[0], self.unit_ids.shape[1]

    @cached_property
    def is_padding(self) -> Tensor:
        """Bool [U], on the CPU: units that contribute nothing."""
        there = torch.zeros(self.units, dtype=torch.bool)
        there[list(self.places)] = True
        if self.samples is not None:
            there &= torch.arange(self.units) < self.samples
        return ~there

    def owners(self, device: torch.device) -> Tensor:
        """Return the unit of every token, int64 [R * T], negative for padding."""
        return self.unit_ids.detach().to(device, torch.int64).flatten()


def packed_unit_ids(
    *, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, tokens: int | None = None
) -> Tensor:
    """Return the unit of every token for `engine.packed` and `losses.packed_cross_entropy`.

    Args:
        position_ids: [R, T] or [T], as of Hugging Face's DataCollatorWithFlattening. A unit begins where
            positions start anew: a document whose positions restart would count as two.
        cu_seqlens: [U + 1], as for varlen attention: 0, and the end of every unit in a stream [T].
        tokens: T of that stream, if padding follows the last unit.

    Raises BatchLayoutError for positions that do not count up from one number, and for ends that fall.
    """
    if (position_ids is None) == (cu_seqlens is None) or (tokens is not None and cu_seqlens is None):
        raise BatchLayoutError("packed_unit_ids takes position_ids, or cu_seqlens with or without tokens.")
    if position_ids is not None:
        return _of_positions(position_ids)
    ends = cu_seqlens
    if not _is_whole(ends) or ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise BatchLayoutError("cu_seqlens must be whole numbers [U + 1] that begin with 0 and never fall.")
    T = int(ends[-1]) if tokens is None else tokens
    if int(ends[-1]) > T:
        raise BatchLayoutError(f"cu_seqlens ends at token {int(ends[-1])}, and the stream has tokens={tokens}.")
    ids_T = torch.full((T,), NO_UNIT, device=ends.device)
    numbers = torch.arange(len(ends) - 1, device=ends.device)
    ids_T[: int(ends[-1])] = numbers.repeat_interleave(ends.diff().long())
    return ids_T


def _of_positions(position_ids: Tensor) -> Tensor:
    if not _is_whole(position_ids) or position_ids.dim() not in (1, 2) or position_ids.numel() == 0:
        raise BatchLayoutError("position_ids must be whole numbers [R, T] or [T].")
    p_RT = position_ids if position_ids.dim() == 2 else position_ids[None]
    begins_RT = torch.ones_like(p_RT, dtype=torch.bool)
    begins_RT[:, 1:] = p_RT.diff(dim=1) != 1
    first = p_RT[begins_RT].unique().tolist()
    if len(first) > 1:
        raise BatchLayoutError(
            f"position_ids begin units at {first[:4]}, and each unit must begin at the same position, mostly 0, and "
            f"count up by 1. If rows have padding or continue a unit, make unit_ids yourself."
        )
    return begins_RT.flatten().cumsum(0).view_as(position_ids) - 1


def _is_whole(x: Tensor | None) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
