"""Records of tables that are read by row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.numerics import add_rows, as_real, has_atomics, norms, sum_floor, wide, zero_rows


@dataclass(frozen=True, slots=True)
class EmbeddingRecord:
    """Gradient of a parameter viewed as a table [V, C]; position t of sample i read row ids_it."""

    ids: Tensor
    """[B, T], int64; negative: no read (padding_idx)"""
    values: Tensor
    """[B, T, C]: gradient of each read"""
    shape: torch.Size
    """A view of [V, C]."""

    def read(self) -> Tensor:
        """Values, zero where nothing was read."""
        return torch.where((self.ids >= 0)[:, :, None], wide(self.values), 0)

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], without a tensor [T, T] or [B, V, C]."""
        values = self.read()
        ids, order = self.ids.sort(dim=1)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run_BT = starts.cumsum(1) - 1
        values = values.gather(1, order[:, :, None].expand_as(values))
        runs = _added(values, run_BT, ids.shape[1])
        floor = sum_floor(torch.linalg.vector_norm(values, dim=2).sum(1))
        return torch.maximum(norms(runs), floor).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        values = self.read()
        return _added(values, self.ids.clamp(min=0), self._count()).view(len(values), *self.shape)

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        values = self.read() * sum_weight_B.to(wide(self.values).dtype)[:, None, None]
        return add_rows(values.flatten(0, 1), self.ids.clamp(min=0).flatten(), self._count()).view(self.shape)

    def _count(self) -> int:
        return self.shape.numel() // max(self.values.shape[2], 1)

    def real(self) -> EmbeddingRecord:
        """Return real pairs for complex numbers."""
        if not self.values.is_complex():
            return self
        return EmbeddingRecord(self.ids, as_real(self.values).flatten(2), torch.Size((*self.shape, 2)))

    def without(self, nonfinite_B: Tensor) -> EmbeddingRecord:
        """Zero the samples `nonfinite_B`."""
        return replace(self, values=zero_rows(self.values, nonfinite_B))


def _added(values: Tensor, rows_BT: Tensor, count: int) -> Tensor:
    """Sum values [B, T, C] by row, to [B, count, C]."""
    B, _, C = values.shape
    if not has_atomics(values.device):
        return values.new_zeros(B, count, C).scatter_add_(1, rows_BT[:, :, None].expand_as(values), values)
    first_B1 = torch.arange(B, device=values.device)[:, None] * count
    return add_rows(values.flatten(0, 1), (rows_BT + first_B1).flatten(), B * count).view(B, count, C)
