"""The records of several uses with equal sizes, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels import triton
from dpshard.records.bundle import Small
from dpshard.records.measure import measure
from dpshard.records.numerics import flat, wide
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad


@dataclass(frozen=True, slots=True)
class Stacked:
    """Records of n uses with B samples each, as one of n * B samples, use by use."""

    record: Small
    uses: int

    def measured(self, method: NormMethod, *, keep: bool) -> tuple[Tensor, Stacked]:
        """Return squared norms [n, B], and records of the same sums."""
        norm_sq, (kept,) = measure([self.record], method, keep=keep, closing=True)
        assert isinstance(kept, PerSampleGrad | OuterProduct)
        return norm_sq.view(self.uses, -1), replace(self, record=kept)

    def clipped_sums(self, sum_weight_nB: Tensor) -> Sequence[Tensor]:
        """Return sum_i sum_weight_i * gradient_i of every use: n tensors, each with its own memory."""
        record, n = self.record, self.uses
        if isinstance(record, PerSampleGrad):
            shape = record.gradient.shape[1:]
            if triton.supports_rows(record.gradient):
                rows_nBE = record.gradient.reshape(n, sum_weight_nB.shape[1], shape.numel())
                sums = triton.weighted_rows(rows_nBE, sum_weight_nB.float())
            else:
                rows_nBE = flat(record.gradient).view(n, sum_weight_nB.shape[1], -1)
                sums = torch.bmm(sum_weight_nB.to(rows_nBE.dtype)[:, None], rows_nBE)
        elif triton.supports_product(record.rows, record.cols):
            parts = zip(record.rows.chunk(n), record.cols.chunk(n), sum_weight_nB.unbind(), strict=True)
            return [OuterProduct(rows, cols, record.shape).clipped_sum(weight_B) for rows, cols, weight_B in parts]
        else:
            sums, shape = self._products(record, sum_weight_nB), record.shape
        # Copies, because each becomes a gradient of its own.
        return torch.unbind_copy(sums.view(n, *shape))  # type: ignore[return-value]

    def _products(self, record: OuterProduct, sum_weight_nB: Tensor) -> Tensor:
        rows, cols = wide(record.rows), wide(record.cols)
        weight = sum_weight_nB.reshape(-1, 1, 1, 1).to(rows.dtype)
        if rows.numel() <= cols.numel():
            rows = rows * weight
        else:
            cols = cols * weight
        rows, cols = (
            x.unflatten(0, sum_weight_nB.shape).transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in (rows, cols)
        )
        return torch.bmm(rows.mT, cols)

    def without(self, nonfinite_nB: Tensor) -> Stacked:
        """Zero the samples `nonfinite_nB` (bool [n, B])."""
        return replace(self, record=self.record.without(nonfinite_nB.flatten()))
