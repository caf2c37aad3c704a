"""Assigns records of routed rows to their samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.numerics import add_rows, wide
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.routed_reads import RoutedReads
from dpshard.records.vocabulary import HeadRecord


def of_samples(record: Record, sample_N: Tensor, batch_size: int) -> Record:
    """Return the record of N rows as one of `batch_size` samples; row n belongs to sample_N[n] (int64)."""
    if isinstance(record, PerSampleGrad):
        return PerSampleGrad(add_rows(wide(record.gradient), sample_N, batch_size))
    if isinstance(record, EmbeddingRecord):
        owner = sample_N.repeat_interleave(record.ids.shape[1])
        return RoutedReads(record.ids.flatten(), record.values.flatten(0, 1), owner, batch_size, record.shape)
    if isinstance(record, RoutedReads | RoutedProduct):
        return replace(record, sample=sample_N[record.sample], batch_size=batch_size)
    if isinstance(record, Convolution | HeadRecord):
        record = record.outer()
    N, G, T, _ = record.rows.shape
    group = torch.arange(G, device=sample_N.device)[:, None].expand(N, G, T).flatten()
    rows, cols = record.rows.flatten(0, 2), record.cols.flatten(0, 2)
    return RoutedProduct(rows, cols, sample_N.repeat_interleave(G * T), group, batch_size, record.shape)


@dataclass(frozen=True, slots=True)
class Owners:
    """The sample to which each row belongs, if rows hold packed samples."""

    sample_N: Tensor
    """int64 [N]; negative: padding"""
    batch_size: int
    """B"""

    def assign(self, record: Record) -> Record:
        """Return the record of N rows as one of B samples."""
        B, padding_N = self.batch_size, self.sample_N < 0
        if isinstance(record, PerSampleGrad):
            spare = torch.where(padding_N, B, self.sample_N)  # row B for padding: 0 * NaN would reach others
            return PerSampleGrad(add_rows(wide(record.gradient), spare, B + 1)[:B])
        owned = of_samples(record, torch.arange(len(padding_N), device=padding_N.device), len(padding_N))
        assert isinstance(owned, RoutedProduct | RoutedReads)
        sample = self.sample_N[owned.sample]
        owned = replace(owned, sample=sample.clamp(min=0), batch_size=B)
        if isinstance(owned, RoutedReads):
            return replace(owned, ids=torch.where(sample < 0, -1, owned.ids))
        return replace(owned, group=torch.where(sample < 0, -1, owned.group))
