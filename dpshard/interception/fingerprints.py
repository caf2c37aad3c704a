"""Fingerprints of the rows of a tensor, and whether two tensors hold the same rows in different orders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 4096
"""Elements of a row that are looked at, evenly spaced: what permutes rows permutes all of each."""

MANY = 16
"""So many different rows come in another order by a permutation, never by chance: 16! / 16^16 is 1e-6."""

_HOST = torch.device("cpu")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = -7046029254386353131  # 2^64 over the golden ratio
_MIX_AGAIN = -4658895280553007687

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a row: rows of different kinds are not compared."""


def sampled(x: Tensor, dim: int) -> Tensor:
    """Evenly spaced elements of `x`, at most WIDTH of each row (which lie along `dim`); a view, rows first."""
    x = x.detach().movedim(dim, 0)
    while (row := x[:1].numel()) > WIDTH:
        longest = max(range(1, x.dim()), key=lambda d: x.shape[d])
        step = min(x.shape[longest], -(-row // WIDTH))
        x = x[(slice(None),) * longest + (slice(None, None, step),)]
    return x


def kind_of(x: Tensor, dim: int) -> Kind:
    """What rows of `x` along `dim` are compared by."""
    return x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one tensor."""

    row_B: Tensor
    """A hash of each row, int64: of the bits of its elements and their places."""
    all: Tensor
    """A hash of the rows in whatever order, int64 []."""

    @classmethod
    def of(cls, sampled: Tensor) -> Rows:
        """Of what `sampled` gives."""
        x = torch.view_as_real(sampled.resolve_conj()) if sampled.is_complex() else sampled
        words = x.contiguous().view(_WORDS[x.itemsize]).long()
        words = words.reshape(len(words), words[:1].numel())
        places = torch.arange(words.shape[1], device=words.device)
        row_B = _mixed(words + places * _MIX).sum(1)
        return cls(row_B, _mixed(row_B).sum())


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ (words >> 31)) * _MIX
    words = (words ^ (words >> 29)) * _MIX_AGAIN
    return words ^ (words >> 32)


class Seen:
    """Tensors with a row a sample that were seen before, by the kind of their rows."""

    def __init__(self) -> None:
        self._rows: dict[Kind, list[Rows]] = {}

    def add(self, kind: Kind, rows: Rows) -> None:
        """Remember these."""
        self._rows.setdefault(kind, []).append(rows)

    def moved(self, kind: Kind, rows: Rows) -> Tensor:
        """Whether the same rows were seen in another order, and never in this one; bool []."""
        device = rows.row_B.device
        # To bring hashes from an accelerator to the host is to wait for it.
        seen = [x for x in self._rows.get(kind, []) if x.row_B.device in (device, _HOST)]
        if not seen:
            return torch.zeros((), dtype=torch.bool, device=device)
        same_S = (torch.stack([x.row_B.to(device) for x in seen]) == rows.row_B).all(1)
        alike_S = torch.stack([x.all.to(device) for x in seen]) == rows.all
        return alike_S.any() & ~same_S.any()


def reordered(leaves: list[tuple[Kind, Rows]], seen: Seen) -> Tensor | None:
    """Whether rows that are handed over as `leaves` were `seen` in another order; bool [], None if nobody can tell.

    A few rows of numbers may meet by chance, time steps of a sequence, say. So with fewer than MANY different rows,
    every leaf must be reordered, but for those with equal rows, and single integers do not count.
    """
    if not leaves:
        return None
    device = next((rows.row_B.device for _, rows in leaves if rows.row_B.device != _HOST), _HOST)
    by_many = torch.zeros((), dtype=torch.bool, device=device)
    any_moved, all_moved = by_many, ~by_many
    for (dtype, shape), rows in leaves:
        moved = seen.moved((dtype, shape), rows).to(device)
        in_order_B = rows.row_B.sort().values.to(device)
        changes = (in_order_B[1:] != in_order_B[:-1]).sum()
        by_many = by_many | (moved & (changes >= MANY - 1))
        if dtype.is_floating_point or torch.Size(shape).numel() > 1:
            any_moved = any_moved | moved
            all_moved = all_moved & (moved | (changes == 0))
    return by_many | (any_moved & all_moved)
