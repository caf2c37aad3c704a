"""Records of routed rows: rules treat each of N rows as a sample; this module assigns rows to samples."""

from __future__ import annotations

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
