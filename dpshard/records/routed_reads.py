"""Records of a table read by the rows of all samples in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.numerics import add_rows, as_real, norms, places_in_runs, sum_floor, wide, zero_rows


@dataclass(frozen=True, slots=True)
class RoutedReads:
    """Gradient of a parameter viewed as a table [V, C]; read n of sample_n got row ids_n."""

    ids: Tensor
    """[N], int64; negative: no read"""
    values: Tensor
    """[N, C]: gradient of each read"""
    sample: Tensor
    """[N], int64, in 0..B-1"""
    batch_size: int
    """B"""
    shape: torch.Size
    """A view of [V, C]."""

    @property
    def table(self) -> int:
        """V."""
        return self.shape.numel() // self.values.shape[1]

    def read(self) -> Tensor:
        """Values, zero where nothing was read."""
        return torch.where((self.ids >= 0)[:, None], wide(self.values), 0)

    def scale(self) -> Tensor:
        """Return the sums [B] of the norms of the values."""
        return add_rows(torch.linalg.vector_norm(self.read(), dim=1), self.sample, self.batch_size)

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]."""
        keys, place = torch.unique(self._keys(), return_inverse=True)
        runs = add_rows(self.read(), place, len(keys))
        norm_sq = add_rows(norms(runs).square(), keys // self.table, self.batch_size)
        return torch.maximum(norm_sq, sum_floor(self.scale()).square())

    def _keys(self) -> Tensor:
        return self.sample * self.table + self.ids.clamp(min=0)

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return add_rows(self.read(), self._keys(), self.batch_size * self.table).view(self.batch_size, *self.shape)

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        values = self.read() * sum_weight_B.to(wide(self.values).dtype)[self.sample][:, None]
        return add_rows(values, self.ids.clamp(min=0), self.table).view(self.shape)

    def of(self, samples: Tensor) -> EmbeddingRecord:
        """Return the reads of samples [b], padded with id -1."""
        number = torch.full((self.batch_size,), -1, device=samples.device)
        number[samples] = torch.arange(len(samples), device=samples.device)
        chosen = (number[self.sample] >= 0) & (self.ids >= 0)
        sample = number[self.sample[chosen]]
        counts = torch.zeros_like(samples).index_add_(0, sample, torch.ones_like(sample))
        place = places_in_runs(sample, counts)
        size = len(samples), int(counts.max()) if len(counts) else 0
        ids, values = self.ids.new_full(size, -1), self.values.new_zeros(*size, self.values.shape[1])
        ids[sample, place], values[sample, place] = self.ids[chosen], self.values[chosen]
        return EmbeddingRecord(ids, values, self.shape)

    def whole(self) -> EmbeddingRecord:
        """Return all reads, padded."""
        return self.of(torch.arange(self.batch_size, device=self.ids.device))

    def real(self) -> RoutedReads:
        """Return real pairs for complex numbers."""
        if not self.values.is_complex():
            return self
        return replace(self, values=as_real(self.values).flatten(1), shape=torch.Size((*self.shape, 2)))

    def without(self, nonfinite_B: Tensor) -> RoutedReads:
        """Zero the samples `nonfinite_B`."""
        return replace(self, values=zero_rows(self.values, nonfinite_B[self.sample]))
