"""Records of a weight applied to the rows of all samples in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.numerics import add_rows, as_real, wide, zero_rows
from dpshard.records.outer_product import OuterProduct


@dataclass(frozen=True, slots=True)
class RoutedProduct:
    """Gradient sum_n rows_n (x) cols_n of a weight [G, R, C], over the rows n that the data sent to group_n.

    The rows of all samples lie in any order, as experts receive them.
    """

    rows: Tensor
    """[N, R]"""
    cols: Tensor
    """[N, C]"""
    sample: Tensor
    """[N], int64: sample of each row, in 0..B-1"""
    group: Tensor
    """[N], int64; a row with a group outside 0..G-1 used no weight"""
    batch_size: int
    """B"""
    shape: torch.Size
    """Shape of the parameter, a view of [G, R, C]."""

    @property
    def groups(self) -> int:
        """G."""
        return self.shape.numel() // (self.rows.shape[1] * self.cols.shape[1])

    def _by(self, key: Tensor, rows: Tensor) -> tuple[Tensor, OuterProduct]:
        """Return the K distinct values of `key` [N], and a product [R, C] of the rows of each, padded with zeros."""
        met = (self.group >= 0) & (self.group < self.groups)
        key, rows, cols = key[met], rows[met], wide(self.cols[met])
        order = key.argsort(stable=True)
        keys, place, counts = torch.unique_consecutive(key[order], return_inverse=True, return_counts=True)
        longest = int(counts.max()) if len(counts) else 0
        within = torch.arange(len(order), device=key.device) - (counts.cumsum(0) - counts)[place]

        def padded(x: Tensor) -> Tensor:
            out = x.new_zeros(len(keys), 1, longest, x.shape[1])
            out[place, 0, within] = x[order]
            return out

        return keys, OuterProduct(padded(rows), padded(cols), torch.Size((rows.shape[1], cols.shape[1])))

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]; those of groups add up, because groups are different elements of the weight."""
        keys, product = self._by(self.sample * self.groups + self.group, wide(self.rows))
        norm_sq = product.norm_sq(method)
        return add_rows(norm_sq, keys // self.groups, self.batch_size)

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return self._placed(self.sample * self.groups + self.group, wide(self.rows), self.batch_size)

    def clipped_sum(self, clip_coef_B: Tensor) -> Tensor:
        """sum_i clip_coef_i * gradient_i, [*shape]."""
        rows = wide(self.rows)
        return self._placed(self.group, rows * clip_coef_B.to(rows.dtype)[self.sample][:, None], 1)[0]

    def _placed(self, key: Tensor, rows: Tensor, n: int) -> Tensor:
        keys, product = self._by(key, rows)
        out = rows.new_zeros(n * self.groups, *product.shape)
        out[keys] = product.per_sample()
        return out.view(n, *self.shape)

    def real(self) -> RoutedProduct:
        """See record.py and OuterProduct.real."""
        if not self.rows.is_complex():
            return self
        return replace(
            self,
            rows=torch.cat((self.rows.real, self.rows.imag)),
            cols=torch.cat([as_real(x).flatten(1) for x in (self.cols, 1j * self.cols)]),
            sample=self.sample.repeat(2),
            group=self.group.repeat(2),
            shape=torch.Size((*self.shape, 2)),
        )

    def without(self, nonfinite_B: Tensor) -> RoutedProduct:
        """Return a copy with exact zeros for `nonfinite_B` (bool [B])."""
        dead_N = nonfinite_B[self.sample]
        return replace(self, rows=zero_rows(self.rows, dead_N), cols=zero_rows(self.cols, dead_N))
