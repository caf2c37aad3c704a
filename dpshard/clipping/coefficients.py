"""Norms and clip coefficients of groups that close together, by the functions of functions.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from dpshard.clipping.functions import ClippingFunction, factors
from dpshard.clipping.group_tape import GroupTape
from dpshard.clipping.stacks import Stack
from dpshard.records import OwnMemory, add_rows
from dpshard.records.host import all_finite, elementwise, total
from dpshard.records.numerics import index_tensor


class Pass(Enum):
    """Purpose of a backward pass."""

    BOOK_KEEPING = auto()  # one pass: keep records
    NORMS = auto()  # first of two passes: measure records
    SUMS = auto()  # second of two passes: sum records


@dataclass(frozen=True, slots=True)
class Measured:
    """Groups that close together, and their squared norms."""

    indices: Sequence[int]
    own: Sequence[int]
    """Places in `indices` of groups with records outside of stacks."""
    stacks: Sequence[Stack]
    rows: Sequence[Sequence[int]]
    """For each stack, the place in `indices` of each parameter's group."""
    norm_sq_MB: Tensor
    scale_B: Tensor | float

    def copy_records(self, groups: Mapping[int, GroupTape]) -> None:
        """Copy the records, because pipeline schedules write the next activations to their memory."""
        memory = OwnMemory()
        for m in self.own:
            groups[self.indices[m]].copy_records(memory)
        for stack in self.stacks:
            stack.copy_records(memory)


@dataclass(frozen=True, slots=True)
class Clipped:
    """Norms and coefficients of M groups."""

    norm_MB: Tensor
    sum_weight_MB: Tensor
    """Clip coefficients times `Measured.scale_B`."""
    nonfinite_MB: Tensor | None
    """Samples of weight 0; None if all norms are finite."""

    def sums(self, stack: Stack, rows: Sequence[int]) -> dict[str, Tensor]:
        """Clipped sums of a stack, by parameter. `rows`: the place of each parameter's group."""
        if len(self.norm_MB) == 1:
            shape = len(rows), self.norm_MB.shape[1]
            nonfinite_nB = None if self.nonfinite_MB is None else self.nonfinite_MB.expand(shape)
            return stack.clipped_sums(self.sum_weight_MB.expand(shape), nonfinite_nB)
        at = index_tensor(tuple(rows), self.norm_MB)
        nonfinite_nB = None if self.nonfinite_MB is None else self.nonfinite_MB[at]
        return stack.clipped_sums(self.sum_weight_MB[at], nonfinite_nB)


def squared_norms(
    groups: int, own: Mapping[int, Sequence[Tensor]], stacked: Sequence[tuple[Sequence[int], Tensor]]
) -> Tensor | None:
    """Squared norms [M, B] of M `groups`, from their `own` [B] and those of stacks [n, B].

    `stacked`: for each stack, the group of each row, and the rows.
    """
    if groups == 1:
        parts = [
            *(norm_sq_B for some in own.values() for norm_sq_B in some),
            *(norm_sq_nB.sum(0) for _, norm_sq_nB in stacked),
        ]
        return total(parts)[None] if parts else None
    rows = [*(m for m, parts in own.items() for _ in parts), *(m for some, _ in stacked for m in some)]
    if not rows:
        return None
    singles = [norm_sq_B[None] for some in own.values() for norm_sq_B in some]
    parts = [*singles, *(norm_sq_nB for _, norm_sq_nB in stacked)]
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    joined = torch.cat([part.to(widest) for part in parts])
    return add_rows(joined, index_tensor(tuple(rows), joined), groups)


def clip(
    norm_sq_MB: Tensor,
    thresholds: Sequence[float],
    function: ClippingFunction,
    *,
    loss_scale: float,
    scale_B: Tensor | float,
) -> Clipped:
    """Return norms and coefficients from squared norms of recorded gradients."""
    norm_MB = elementwise(lambda xp, norm_sq_MB: xp.sqrt(norm_sq_MB) * loss_scale, norm_sq_MB)
    clip_coef_MB = factors(function, norm_MB, thresholds)
    sum_weight_MB = elementwise(lambda _, coef_MB, scale_B: coef_MB * scale_B, clip_coef_MB, scale_B)
    # On an accelerator a test would synchronise, so always mask there.
    return Clipped(norm_MB, sum_weight_MB, None if all_finite(norm_MB) else sum_weight_MB == 0)


class HasSums(Protocol):
    """A tape, as ClippedSums uses it."""

    @property
    def take(self) -> Callable[[str], Tensor | None]:
        """Return a function from a parameter's name to its clipped sum."""
        ...


@dataclass(frozen=True, slots=True)
class ClippedSums:
    """The clipped sums of one anchor."""

    names: Sequence[str]
    tapes: Sequence[HasSums]
    handed_out: bool
    """True in torch.autograd.grad, which would return the sums to its caller."""
    left_out: frozenset[str] = frozenset()
    """Parameters whose gradient the pass does not compute."""

    @classmethod
    def to(cls, names: Sequence[str], tapes: Sequence[HasSums], reached: Sequence[bool] | None) -> ClippedSums:
        """Return the sums. `reached`: whether the pass computes each gradient; None in torch.autograd.grad."""
        if reached is None or all(reached):
            return cls(names, tapes, reached is None)
        return cls(names, tapes, False, frozenset(n for n, there in zip(names, reached, strict=True) if not there))

    @property
    def take(self) -> Callable[[str], Tensor | None]:
        """Return a function from a name to its clipped sum. It returns each sum once, and frees the records."""
        return self.tapes[0].take if len(self.tapes) == 1 and not self.left_out else self._total

    def _total(self, name: str) -> Tensor | None:
        if name in self.left_out:
            return None
        total: Tensor | None = None
        for tape in self.tapes:
            part = tape.take(name)
            total = part if total is None else total if part is None else total + part
        return total
