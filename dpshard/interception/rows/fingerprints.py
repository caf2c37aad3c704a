"""Fingerprints of rows, to detect that they come in another order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

WIDTH = 4096
"""Most elements of a row that a fingerprint reads."""

MANY = 16
"""Number of different rows that are not the same in another order by chance: 16! / 16^16 is 1e-6."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = -7046029254386353131  # 2^64 over the golden ratio
_MIX_AGAIN = -4658895280553007687

Kind = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""Dtype, device and shape of a row."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a tensor."""

    tensor: Tensor
    dim: int
    kind: Kind

    @classmethod
    def of(cls, x: Tensor, dim: int) -> Rows:
        """Return the rows of `x` along `dim`."""
        return cls(x, dim, (x.dtype, x.device, (*x.shape[:dim], *x.shape[dim + 1 :])))

    def light(self) -> Rows:
        """Return rows with the same fingerprints, without a reference to a large tensor."""
        small = self.tensor.numel() <= WIDTH * self.tensor.shape[self.dim]
        return self if small else Rows(self.sampled.clone(), 0, self.kind)

    @property
    def counts(self) -> bool:
        """True if a few of these rows show an order. Single integers would match by chance."""
        return self.tensor.is_floating_point() or self.tensor.numel() > self.tensor.shape[self.dim]

    @cached_property
    def sampled(self) -> Tensor:
        """At most WIDTH evenly spaced elements of each row; a view, rows first."""
        x = self.tensor.detach().movedim(self.dim, 0)
        while (row := x[:1].numel()) > WIDTH:
            longest = max(range(1, x.dim()), key=lambda d: x.shape[d])
            step = min(x.shape[longest], -(-row // WIDTH))
            x = x[(slice(None),) * longest + (slice(None, None, step),)]
        return x

    @cached_property
    def checksum(self) -> int:
        """Checksum of the bits, independent of their order; for tensors on the CPU."""
        return int(_words(self.sampled).sum())

    @cached_property
    def hash_B(self) -> Tensor:
        """Hash of each row, int64."""
        words = _words(self.sampled).long()
        words = words.reshape(len(words), words[:1].numel())
        return mixed(words + torch.arange(words.shape[1], device=words.device) * _MIX).sum(1)

    @cached_property
    def hash(self) -> Tensor:
        """Hash of the rows, independent of their order; int64 []."""
        return mixed(self.hash_B).sum()

    @property
    def changes(self) -> Tensor:
        """Number of different rows minus one; int64 []."""
        ordered_B = self.hash_B.sort().values
        return (ordered_B[1:] != ordered_B[:-1]).sum()

    def hash_of_units(self, rows_per_unit: int) -> Tensor:
        """Return a hash of each unit's rows, independent of their order; int64 [units]."""
        return self.hash_B if rows_per_unit == 1 else mixed(self.hash_B).view(-1, rows_per_unit).sum(1)

    def reorder(self, others: list[Rows], rows_per_unit: int = 1) -> Tensor | None:
        """Return True (bool []) if one of `others` has these rows, and none has them in this order.

        The order within a unit does not count.
        """
        if any(self.tensor is other.tensor for other in others):
            return None
        if self.tensor.device.type == "cpu":
            others = [other for other in others if other.checksum == self.checksum]
            if any(torch.equal(self.sampled, other.sampled) for other in others):
                return None
        if not others:
            return None
        known = torch.stack([other.hash_of_units(rows_per_unit) for other in others])
        in_order = (known == self.hash_of_units(rows_per_unit)).all(1).any()
        return (torch.stack([other.hash for other in others]) == self.hash).any() & ~in_order


def _words(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(_WORDS[x.itemsize])


def mixed(words: Tensor) -> Tensor:
    """Return a hash of each word, int64."""
    words = (words ^ (words >> 31)) * _MIX
    words = (words ^ (words >> 29)) * _MIX_AGAIN
    return words ^ (words >> 32)


class Seen:
    """The rows of earlier tensors."""

    def __init__(self, rows_per_unit: int = 1) -> None:
        self._rows: dict[Kind, list[Rows]] = {}
        self._rows_per_unit = rows_per_unit

    def add(self, rows: Rows) -> None:
        """Remember these rows."""
        self._rows.setdefault(rows.kind, []).append(rows)

    def reordered(self, inputs: list[Rows]) -> Tensor | None:
        """Return True (bool []) if `inputs` hold earlier rows in another order; None if this is impossible.

        Fewer than MANY different rows may match by chance. Then the result is True only if every input is reordered,
        except inputs of equal rows or single integers.
        """
        moved = [rows.reorder(self._rows.get(rows.kind, []), self._rows_per_unit) for rows in inputs]
        found = [flag for flag in moved if flag is not None]
        if not found:
            return None
        device = next((flag.device for flag in found if flag.device.type != "cpu"), found[0].device)
        by_many = torch.zeros((), dtype=torch.bool, device=device)
        some, all_ = by_many, ~by_many
        for rows, flag in zip(inputs, moved, strict=True):
            if rows.tensor.device.type == "cpu" and device.type != "cpu":
                continue  # to hash such a tensor, a transfer would be needed
            moves, changes = by_many & False if flag is None else flag, rows.changes
            by_many = by_many | (moves & (changes >= MANY - 1))
            if rows.counts:
                some, all_ = some | moves, all_ & (moves | (changes == 0))
        return by_many | (some & all_)
