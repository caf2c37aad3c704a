"""Norms of the sum of a parameter's records, with every cross term."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels.underflow import hidden
from dpshard.records.convolution import Convolution
from dpshard.records.cost import ProductSize
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.numerics import add_rows, flat, gram_bound, norms, wide
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.routed_reads import RoutedReads
from dpshard.records.vocabulary import HeadRecord


def join(records: Sequence[Record]) -> list[Record]:
    """Join the records of one gradient, so that each kind has one."""
    if len(records) == 1:
        return list(records)
    kinds: dict[object, list[Record]] = {}
    for record in map(_expanded(records), records):
        kinds.setdefault(_kind(record), []).append(record)
    return [_join(kind) if len(kind) > 1 else kind[0] for kind in kinds.values()]


def _expanded(records: Sequence[Record]) -> Callable[[Record], Record]:
    # The inner product with a tied embedding needs few rows of a head; other records need all.
    tied = sum(isinstance(r, HeadRecord) for r in records) == 1
    tied = tied and all(isinstance(r, HeadRecord | EmbeddingRecord) for r in records)
    kinds = Convolution if tied else (Convolution, HeadRecord)
    return lambda record: record.outer() if isinstance(record, kinds) else record


def _kind(record: Record) -> object:
    if isinstance(record, OuterProduct):
        return record.rows.shape[1], record.rows.shape[3], record.cols.shape[3]
    if isinstance(record, RoutedReads):
        return RoutedReads, record.values.shape[1]
    if isinstance(record, RoutedProduct):
        return RoutedProduct, record.rows.shape[1], record.cols.shape[1]
    return record.values.shape[2] if isinstance(record, EmbeddingRecord) else type(record)


_TERMS: dict[type[Any], dict[str, int]] = {
    OuterProduct: {"rows": 2, "cols": 2},
    EmbeddingRecord: {"ids": 1, "values": 1},
    RoutedReads: {"ids": 0, "values": 0, "sample": 0},
    RoutedProduct: {"rows": 0, "cols": 0, "sample": 0, "group": 0},
}
"""The fields that hold the terms of a record's sum, and the dimension of the terms."""


def _join(kind: Sequence[Record]) -> Record:
    first: Any = kind[0]
    if type(first) not in _TERMS:
        return PerSampleGrad(sum((r.per_sample() for r in kind[1:]), first.per_sample()))
    terms = _TERMS[type(first)].items()
    return replace(first, **{name: torch.cat([getattr(r, name) for r in kind], dim) for name, dim in terms})


def measure(
    records: Sequence[Record], method: NormMethod, *, keep: bool, closing: bool = False
) -> tuple[Tensor, list[Record]]:
    """Return squared norms [B] of the sum of the records' gradients, and records of the same sum.

    With `keep`, an instantiated gradient replaces its record; the cheapest method keeps only those that memory allows.
    """
    joined = join(records)
    if len(joined) == 1:
        (record,) = joined
        if keep and isinstance(record, (OuterProduct, Convolution)) and _keeps(record.size, method, closing):
            gradient, norm_sq = record.instantiated()
            return norm_sq, [PerSampleGrad(gradient)]
        return record.norm_sq(method), joined
    squares = sum((r.norm_sq(method) for r in joined[1:]), joined[0].norm_sq(method))
    total = squares
    for first, second in itertools.combinations(joined, 2):
        total = total + 2 * inner(first, second)
    scale = sum((_scale(r) for r in joined[1:]), _scale(joined[0]))
    return gram_bound(total, torch.maximum(scale, squares.sqrt())), joined


def _scale(record: Record) -> Tensor:
    """Sum of the norms [B] of a gradient's terms."""
    if isinstance(record, OuterProduct):
        return (norms(record.rows, 3) * norms(record.cols, 3)).sum((1, 2))
    if isinstance(record, HeadRecord):
        return record.scale_of_terms()
    if isinstance(record, EmbeddingRecord):
        return torch.linalg.vector_norm(record.read(), dim=2).sum(1)
    if isinstance(record, RoutedReads):
        return record.scale()
    if isinstance(record, RoutedProduct):
        sizes = torch.where(record.met, norms(record.rows) * norms(record.cols), 0)
        return add_rows(sizes, record.sample, record.batch_size)
    return norms(record.per_sample())


def _keeps(size: ProductSize, method: NormMethod, closing: bool) -> bool:
    if method is NormMethod.CHEAPEST:
        return size.may_be_kept(closing=closing) and size.instantiates(kept=True, closing=closing)
    return method is NormMethod.INSTANTIATE


def inner(first: Record, second: Record) -> Tensor:
    """Upper bounds [B] of the inner products of two records' gradients."""
    first, second = sorted((first, second), key=lambda record: isinstance(record, RoutedReads | EmbeddingRecord))
    if isinstance(first, RoutedProduct) and isinstance(second, RoutedReads) and _is_tied(first, second):
        return _inner_routed(first, second)
    first, second = (r.whole() if isinstance(r, RoutedReads) else r for r in (first, second))
    if isinstance(first, HeadRecord) and isinstance(second, EmbeddingRecord):
        return first.inner_gather(second)
    if (
        isinstance(first, OuterProduct)
        and isinstance(second, EmbeddingRecord)
        and first.rows.shape[1] == 1
        and first.cols.shape[3] == second.values.shape[2]
    ):
        return _inner_outer_gather(first, second)
    products = flat(first.per_sample()) * flat(second.per_sample())
    return products.sum(1) + hidden(products[0].numel(), products.dtype)


def _is_tied(product: RoutedProduct, reads: RoutedReads) -> bool:
    return product.groups == 1 and product.cols.shape[1] == reads.values.shape[1]


def _inner_routed(product: RoutedProduct, reads: RoutedReads) -> Tensor:
    total = torch.zeros(product.batch_size, dtype=wide(product.rows).dtype, device=product.rows.device)
    for samples, part in product.by_length():
        total = total.index_copy(0, samples, _inner_outer_gather(part, reads.of(samples)))
    return total


def _inner_outer_gather(outer: OuterProduct, gather: EmbeddingRecord) -> Tensor:
    """<sum_t r_t (x) c_t, gather> = sum_t' <sum_t r_t[id_t'] c_t, v_t'> [B], without a [V, C]."""
    rows_BTV, cols_BTC, values_BtC = wide(outer.rows)[:, 0], wide(outer.cols)[:, 0], gather.read()
    ids = gather.ids.clamp(min=0)
    picked_BTt = rows_BTV.gather(2, ids[:, None, :].expand(-1, rows_BTV.shape[1], -1))
    # Both factors are gradients. Underflow in <c_t, v_t'> would grow with a large r_t.
    products = (picked_BTt.mT @ cols_BTC) * values_BtC
    return products.sum((1, 2)) + hidden(products[0].numel(), products.dtype)
