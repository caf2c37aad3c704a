"""Units of one packed row that have no finite gradient together.

[Note: Spread] Attention within units multiplies the values of other units by 0, and 0 * inf is NaN. So a unit whose
activations overflow may take away the gradients of all units in its row. Each would count as a sample without a finite
gradient, and one unit would decide about all. Nothing tells these from units that overflow by themselves. If a row has
one such unit, it contributes nothing, as without packing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpshard.interception import Doubt, Doubts
from dpshard.sampling import PackedTokens

_TOGETHER = 64


def row_watches(packed: PackedTokens | None, is_padding_U: Tensor | None) -> list[tuple[Tensor, RowWatch]]:
    """Return what watches a micro-batch, by its mask; [] unless its rows hold several units."""
    if packed is None or is_padding_U is None or not packed.side_by_side:
        return []
    return [(is_padding_U, RowWatch(packed, is_padding_U))]


class RowWatch:
    """Watches the units of a packed micro-batch, without synchronising with the device."""

    def __init__(self, packed: PackedTokens, is_padding_U: Tensor) -> None:
        row_U = torch.zeros(packed.units, dtype=torch.int64, device="cpu")
        for unit, (row, _, _) in packed.places.items():
            row_U[unit] = row
        self._row_U, self._rows = row_U.to(is_padding_U.device), packed.shape[0]
        self._is_padding_U, self._lost_U = is_padding_U, torch.zeros_like(is_padding_U)
        self._norms: list[Tensor] = []

    def observe(self, _: Any, norm_U: Tensor) -> None:
        """Take a group's norms."""
        self._norms.append(norm_U.detach())
        if len(self._norms) == _TOGETHER:
            self._take_stock()

    def _take_stock(self) -> None:
        if self._norms:
            finite_U = torch.stack([norm_U.isfinite() for norm_U in self._norms]).all(0)
            self._lost_U |= ~finite_U & ~self._is_padding_U
            self._norms.clear()

    def end(self, doubts: Doubts, _: Any) -> None:
        """Note a row in which several units have no finite gradient."""
        self._take_stock()
        lost_R = torch.zeros(self._rows, dtype=torch.int64, device=self._lost_U.device)
        lost_R.index_add_(0, self._row_U, self._lost_U.long())
        doubts.note(Doubt.SPREAD, (lost_R > 1).any(), wait=True)
