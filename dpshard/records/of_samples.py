"""Records of routed rows: rules treat each of N rows as a sample; this module assigns rows to samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.numerics import add_rows, wide
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.vocabulary import HeadRecord


def of_samples(record: Record, sample_N: Tensor, batch_size: int) -> Record:
    """Return the record of N rows as one of `batch_size` samples; row n belongs to sample sample_N[n] (int64)."""
    if isinstance(record, PerSampleGrad):
        return PerSampleGrad(add_rows(wide(record.gradient), sample_N, batch_size))
    if isinstance(record, EmbeddingRecord):
        return _gathered(record, sample_N, batch_size)
    if isinstance(record, Convolution | HeadRecord):
        record = record.outer()
    if isinstance(record, OuterProduct):
        N, G, T, _ = record.rows.shape
        group = torch.arange(G, device=sample_N.device)[:, None].expand(N, G, T).flatten()
        rows, cols = record.rows.flatten(0, 2), record.cols.flatten(0, 2)
        return RoutedProduct(rows, cols, sample_N.repeat_interleave(G * T), group, batch_size, record.shape)
    return RoutedProduct(record.rows, record.cols, sample_N[record.sample], record.group, batch_size, record.shape)


def _gathered(record: EmbeddingRecord, sample_N: Tensor, batch_size: int) -> EmbeddingRecord:
    """Gather the reads of each sample; pad with id -1 up to the longest sample."""
    counts = torch.bincount(sample_N, minlength=batch_size)
    order = sample_N.argsort(stable=True)
    place = torch.empty_like(sample_N)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[sample_N[order]]
    (_, T, C), longest = record.values.shape, int(counts.max())
    ids = record.ids.new_full((batch_size, longest, T), -1)
    values = record.values.new_zeros(batch_size, longest, T, C)
    ids[sample_N, place], values[sample_N, place] = record.ids, record.values
    return EmbeddingRecord(ids.flatten(1), values.flatten(1, 2), record.shape)


@dataclass(frozen=True, slots=True)
class Owners:
    """The sample of each row of packed samples; rows without one (padding) are left out of every record."""

    sample_N: Tensor
    """int64 [N]; negative: no sample"""
    batch_size: int
    """B"""

    def assign(self, record: Record) -> Record:
        """Return the record of N rows as one of B samples."""
        B, padding_N = self.batch_size, self.sample_N < 0
        if isinstance(record, PerSampleGrad):
            spare = torch.where(padding_N, B, self.sample_N)  # a sum of its own: 0 * NaN would reach the others
            return PerSampleGrad(add_rows(wide(record.gradient), spare, B + 1)[:B])
        if isinstance(record, EmbeddingRecord):
            kept = padding_N.logical_not().nonzero()[:, 0]
            shown = replace(record, ids=record.ids[kept], values=record.values[kept])
            return of_samples(shown, self.sample_N[kept], B)
        owned = of_samples(record, torch.arange(len(padding_N), device=padding_N.device), len(padding_N))
        assert isinstance(owned, RoutedProduct)
        sample = self.sample_N[owned.sample]
        group = torch.where(sample < 0, -1, owned.group)
        return replace(owned, sample=sample.clamp(min=0), group=group, batch_size=B)
