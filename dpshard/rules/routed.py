"""Rules for routed rows, as experts get them. `Call.samples` holds the sample of each row.

Most rules treat each row as a sample, and `records.of_samples` assigns the records to samples. A grouped product
depends on the position of rows, so it has its own rule. An expert without rows has a gradient of zero, and gets noise
like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.records import Record, RoutedProduct, of_samples
from dpshard.rules.call import Call, Source
from dpshard.rules.registry import routed_rule
from dpshard.rules.torch_functions import functions_named

GROUPED = functions_named(["grouped_mm", "_grouped_mm"], (F, torch))
"""Rows [N, K], sorted by group, times a weight per group [G, K, P]. `offs` [G] are the ends of the groups."""


@routed_rule(*GROUPED)
def grouped_mm(
    call: Call, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Return y_n = x_n W_g for every row n of group g; see GROUPED."""
    axis = None if call.source(mat_a) is not None else call.axis(mat_a)
    if axis is None or not axis.routed or mat_a.dim() != 2:
        raise call.refuse("its first argument is not [N, K] with the rows that were routed", advise=False)
    source = call.source(mat_b)
    if source is None or offs is None or bias is not None or mat_b.dim() != 3:
        raise call.refuse("only x [N, K], a parameter [G, K, P] and offs are supported")
    mat_a = call.hold(mat_a)
    output = call.func(mat_a, call.plain(mat_b), offs=offs, out_dtype=out_dtype)
    group_N = torch.searchsorted(offs.long(), torch.arange(len(mat_a), device=offs.device), right=True)
    row_N = torch.arange(len(mat_a), device=mat_a.device)

    def build(rows: Tensor, g_NP: Tensor) -> Sequence[tuple[Source, Record]]:
        return [(source, RoutedProduct(rows, g_NP, row_N, group_N, len(row_N), torch.Size(source.shape)))]

    return call.tap(output, (mat_a.to(output.dtype),), [source], build)


def without_rows(source: Source, like: Tensor, batch_size: int) -> tuple[Source, Record]:
    """Return the record, zero, of an expert without rows."""
    weight = source if source.slice_of is None else source.slice_of[0]
    none = torch.zeros(0, dtype=torch.int64, device=like.device)
    rows, cols = like.new_zeros(0, 1), like.new_zeros(0, (1, *weight.shape)[-1])
    return weight, RoutedProduct(rows, cols, none, none, batch_size, torch.Size(weight.shape))


def at_samples(source: Source, record: Record, sample_N: Tensor, batch_size: int) -> tuple[Source, Record]:
    """Assign the record of N rows to the rows' samples."""
    record = of_samples(record, sample_N, batch_size)
    if source.slice_of is None or not isinstance(record, RoutedProduct):
        return source, record
        # The record of the weight of all experts joins the other experts' records.
    weight, group = source.slice_of
    return weight, replace(record, group=torch.full_like(record.group, group), shape=torch.Size(weight.shape))
