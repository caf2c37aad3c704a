"""Records of experts: a weight applied to the rows of all samples in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.numerics import add_rows, as_real, places_in_runs, wide, zero_rows
from dpshard.records.outer_product import OuterProduct


@dataclass(frozen=True, slots=True)
class RoutedProduct:
    """Gradient sum_n rows_n (x) cols_n of a weight [G, R, C]; the data sent row n to group_n."""

    rows: Tensor
    """[N, R]"""
    cols: Tensor
    """[N, C]"""
    sample: Tensor
    """[N], int64, in 0..B-1"""
    group: Tensor
    """[N], int64; outside 0..G-1 the row used no weight"""
    batch_size: int
    """B"""
    shape: torch.Size
    """A view of [G, R, C]."""

    @property
    def groups(self) -> int:
        """G."""
        return self.shape.numel() // (self.rows.shape[1] * self.cols.shape[1])

    @property
    def met(self) -> Tensor:
        """Bool [N]; False for rows that meet no group."""
        return (self.group >= 0) & (self.group < self.groups)

    def _by(self, key: Tensor, rows: Tensor) -> tuple[Tensor, OuterProduct]:
        """Return the K distinct values of `key` [N], and a padded product [R, C] of the rows of each."""
        met = self.met
        keys, run, counts = torch.unique(key[met], return_inverse=True, return_counts=True)
        longest, place = int(counts.max()) if len(counts) else 0, places_in_runs(run, counts)

        def padded(x: Tensor) -> Tensor:
            out = x.new_zeros(len(keys), 1, longest, x.shape[1])
            out[run, 0, place] = x
            return out

        rows, cols = rows[met], wide(self.cols[met])
        return keys, OuterProduct(padded(rows), padded(cols), torch.Size((rows.shape[1], cols.shape[1])))

    def by_length(self) -> Iterator[tuple[Tensor, OuterProduct]]:
        """Yield padded products of similar numbers of rows, and the key sample * G + group of each product."""
        key = torch.where(self.met, self.sample * self.groups + self.group, -1)
        keys, place, counts = torch.unique(key, return_inverse=True, return_counts=True)
        length = counts.double().log2().ceil().long().masked_fill(keys < 0, -1)
        for some in length.unique().tolist():
            if some >= 0:
                chosen = (length == some)[place]
                part = replace(self, **{name: getattr(self, name)[chosen] for name in _BY_ROW})
                yield part._by(key[chosen], wide(part.rows))

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]. They add up over groups, which are different elements of the weight."""
        total = torch.zeros(self.batch_size, dtype=wide(self.rows).dtype, device=self.rows.device)
        for keys, product in self.by_length():
            total = total + add_rows(product.norm_sq(method), keys // self.groups, self.batch_size)
        return total

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return self._placed(self.sample * self.groups + self.group, wide(self.rows), self.batch_size)

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        rows = wide(self.rows)
        rows = rows * sum_weight_B.to(rows.dtype)[self.sample][:, None]
        if self.groups > 1:
            return self._placed(self.group, rows, 1)[0]
        met = (self.group == 0).nonzero()[:, 0]
        cols = wide(self.cols)
        if len(met) < len(rows):
            rows, cols = rows[met], cols[met]
        return (rows.mT @ cols).view(self.shape)

    def _placed(self, key: Tensor, rows: Tensor, n: int) -> Tensor:
        keys, product = self._by(key, rows)
        out = rows.new_zeros(n * self.groups, *product.shape)
        out[keys] = product.per_sample()
        return out.view(n, *self.shape)

    def real(self) -> RoutedProduct:
        """Return real pairs for complex numbers."""
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
        """Zero the samples `nonfinite_B`."""
        dead_N = nonfinite_B[self.sample]
        return replace(self, rows=zero_rows(self.rows, dead_N), cols=zero_rows(self.cols, dead_N))


_BY_ROW = ("rows", "cols", "sample", "group")
