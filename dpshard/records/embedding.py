"""Records of tables that are read by row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.numerics import as_real, norms, sum_floor, wide, zero_rows


@dataclass(frozen=True, slots=True)
class EmbeddingRecord:
    """Gradient of a parameter viewed as a table [V, C]; position t of sample i read row ids_it."""

    ids: Tensor
    """[B, T], int64; negative: no read (padding_idx)"""
    values: Tensor
    """[B, T, C]: gradient of each read"""
    shape: torch.Size
    """Shape of the parameter, a view of [V, C]."""

    def read(self) -> Tensor:
        """Values, zero where nothing was read."""
        return torch.where((self.ids >= 0)[:, :, None], wide(self.values), 0)

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]: sorts ids and adds the values of equal ids, without a [T, T] or [B, V, C]."""
        values = self.read()
        ids, order = self.ids.sort(dim=1)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run_BT = starts.cumsum(1) - 1
        values = values.gather(1, order[:, :, None].expand_as(values))
        runs = torch.zeros_like(values).scatter_add_(1, run_BT[:, :, None].expand_as(values), values)
        floor = sum_floor(torch.linalg.vector_norm(values, dim=2).sum(1))
        return torch.maximum(norms(runs), floor).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        values = self.read()
        B, _, C = values.shape
        out = values.new_zeros(B, self.shape.numel() // C, C)
        out.scatter_add_(1, self.ids.clamp(min=0)[:, :, None].expand_as(values), values)
        return out.view(B, *self.shape)

    def clipped_sum(self, clip_coef_B: Tensor) -> Tensor:
        """sum_i clip_coef_i * gradient_i, [*shape]."""
        values = self.read() * clip_coef_B.to(wide(self.values).dtype)[:, None, None]
        C = values.shape[2]
        out = values.new_zeros(self.shape.numel() // C, C)
        return out.index_add_(0, self.ids.clamp(min=0).flatten(), values.flatten(0, 1)).view(self.shape)

    def real(self) -> EmbeddingRecord:
        """See record.py."""
        if not self.values.is_complex():
            return self
        return EmbeddingRecord(self.ids, as_real(self.values).flatten(2), torch.Size((*self.shape, 2)))

    def without(self, nonfinite_B: Tensor) -> EmbeddingRecord:
        """Return a copy with exact zeros for `nonfinite_B` (bool [B])."""
        return replace(self, values=zero_rows(self.values, nonfinite_B))
