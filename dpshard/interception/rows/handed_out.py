"""Compare rows bit by bit with those that `engine.batches` gave to the loop."""

from __future__ import annotations

import torch
from torch import Tensor

from dpshard.interception.rows.fingerprints import MANY, Rows

CONTINUOUS = 3
"""Fewest fractional numbers in a row for a match that is no chance."""
NARROW = 8
"""Number of elements of a row that are compared first."""


def repeats(x: Rows, handed: list[Rows], samples: int) -> Tensor | None:
    """Return True (bool []) if one of the first `samples` rows occurs more often in `x` than in `handed`."""
    if x.tensor.dim() < 2 or not handed or any(x.tensor is y.tensor for y in handed):
        return None
    rows, *out = (y.sampled[:samples].flatten(1) for y in (x, *handed))
    on_host = rows.device.type == "cpu"
    if on_host and any(torch.equal(rows, y) for y in out):
        return None
    found = torch.zeros((), dtype=torch.bool, device=rows.device)
    for width in (NARROW, rows.shape[1]) if on_host else (rows.shape[1],):
        step = max(1, rows.shape[1] // width)
        found = _come_again(rows[:, ::step], [y[:, ::step] for y in out])
        if on_host and not found.any():
            return None
    return (found & _tell_apart(rows)).any()


def transposed(x: Rows, handed: Tensor) -> Tensor | None:
    """Return True (bool []) if `x` is `handed` with dimensions 0 and 1, of equal length, swapped."""
    if handed.dim() < 2 or handed.shape[0] != handed.shape[1] or handed.shape[0] < 2:
        return None
    rows = x.tensor.detach().movedim(x.dim, 0)
    if rows.shape != handed.shape or rows.dtype != handed.dtype:
        return None
    return (rows == handed.transpose(0, 1)).all() & ~(rows == handed).all()


def _come_again(rows: Tensor, handed: list[Tensor]) -> Tensor:
    hash_B = Rows.of(rows, 0).hash_B

    def count(among_B: Tensor) -> Tensor:
        ordered = among_B.sort().values
        return torch.searchsorted(ordered, hash_B, right=True) - torch.searchsorted(ordered, hash_B)

    times_B = torch.stack([count(Rows.of(y, 0).hash_B) for y in handed]).sum(0)
    return (times_B > 0) & (count(hash_B) > times_B)


def _tell_apart(rows: Tensor) -> Tensor:
    """Return, per row (bool [B]), False if it may match others by chance."""
    changes_B = (rows[:, 1:] != rows[:, :-1]).sum(1)
    if not rows.is_floating_point():
        return changes_B >= MANY
    return (changes_B >= CONTINUOUS - 1) & ((rows != rows.round()).sum(1) >= CONTINUOUS)
