"""Records of linear maps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels import native, triton
from dpshard.kernels.underflow import hidden
from dpshard.records.cost import ProductSize, blocks
from dpshard.records.numerics import (
    accum_dtype,
    as_real,
    gram,
    gram_bound,
    norms,
    relative_floor,
    wide,
    zero_rows,
)


@dataclass(frozen=True, slots=True)
class OuterProduct:
    """Gradient sum_t rows_t (x) cols_t of a weight [G, R, C], viewed as `shape`; G > 1 in grouped convolutions."""

    rows: Tensor
    """[B, G, T, R]"""
    cols: Tensor
    """[B, G, T, C]"""
    shape: torch.Size

    @property
    def size(self) -> ProductSize:
        """Sizes that costs depend on."""
        (B, G, T, R), C = self.rows.shape, self.cols.shape[3]
        nbytes = self.rows.nbytes + self.cols.nbytes
        dtype, device = accum_dtype(self.rows), self.rows.device
        return ProductSize(
            B, G, T, R, C, dtype, device, nbytes, by_triton=triton.supports_product(self.rows, self.cols)
        )

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]."""
        if method is NormMethod.INSTANTIATE or (method is NormMethod.CHEAPEST and self.size.instantiates(kept=False)):
            if triton.supports_product(self.rows, self.cols):
                return self._floored(triton.gradient_norm_sq(self.rows, self.cols))
            return self._floored(self.instantiated()[1])
        (B, G, T, R), C = self.rows.shape, self.cols.shape[3]
        if triton.supports_product(self.rows, self.cols) and triton.supports_ghost_norm(B * G, T, R + C):
            return triton.ghost_norm_sq(self.rows, self.cols, relative_floor(torch.float32))
        rows, cols = wide(self.rows), wide(self.cols)
        if T == 1:
            return (norms(rows, 2) * norms(cols, 2)).square().sum(1) + hidden(G, rows.dtype)
        if native.supports_ghost_norm(rows.device, rows.dtype):
            return native.floored_ghost_norm_sq(rows, cols, relative_floor(rows.dtype))
        return _total(gram_bound(*_ghost_norm_sq(rows, cols)))

    def _floored(self, norm_sq_B: Tensor) -> Tensor:
        dims = 1 if self.rows.shape[1] == 1 else 2  # groups round on their own
        return floored(norm_sq_B, self.rows, self.cols, dims=dims)

    def instantiated(self) -> tuple[Tensor, Tensor]:
        """Return `per_sample` and squared norms [B]; the clipped sum must use these gradients."""
        if triton.supports_product(self.rows, self.cols):
            gradient, norm_sq = triton.per_sample(self.rows, self.cols)
            return gradient.view(-1, *self.shape), norm_sq
        gradient = self.per_sample()
        return gradient, norms(gradient).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        if triton.supports_product(self.rows, self.cols):
            return triton.per_sample(self.rows, self.cols)[0].view(-1, *self.shape)
        B = len(self.rows)
        rows, cols = wide(self.rows).flatten(0, 1), wide(self.cols).flatten(0, 1)
        return torch.bmm(rows.mT, cols).view(B, *self.shape)

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        if triton.supports_product(self.rows, self.cols):
            return triton.weighted_sum(self.rows, self.cols, sum_weight_B.float()).view(self.shape)
        rows, cols = wide(self.rows), wide(self.cols)
        if rows.numel() <= cols.numel():
            rows = rows * sum_weight_B.to(rows.dtype)[:, None, None, None]
        else:
            cols = cols * sum_weight_B.to(cols.dtype)[:, None, None, None]
        rows_GNR, cols_GNC = (x.transpose(0, 1).flatten(1, 2) for x in (rows, cols))
        return torch.bmm(rows_GNR.mT, cols_GNC).view(self.shape)

    def real(self) -> OuterProduct:
        """Return the record as real pairs. The parts of (a + ib) c are a times those of c, and b times those of ic."""
        if not self.rows.is_complex():
            return self
        rows = torch.cat((self.rows.real, self.rows.imag), 2)
        cols = torch.cat([as_real(x).flatten(3) for x in (self.cols, 1j * self.cols)], 2)
        return OuterProduct(rows, cols, torch.Size((*self.shape, 2)))

    def without(self, nonfinite_B: Tensor) -> OuterProduct:
        """Zero the samples `nonfinite_B`."""
        if triton.supports_product(self.rows, self.cols):
            return self  # the kernel reads no sample of weight 0
        return replace(self, rows=zero_rows(self.rows, nonfinite_B), cols=zero_rows(self.cols, nonfinite_B))


def floored(norm_sq: Tensor, rows: Tensor, cols: Tensor, overlap: float = 1.0, *, dims: int = 1) -> Tensor:
    """Raise `norm_sq` [B] to at least the squared rounding error of a clipped sum, which uses other products.

    `dims`: 1 for one floor per sample, 2 for one per group. `overlap`: bound on the columns' norm over that of `cols`.
    """
    # sum_t |r_t| |c_t| <= |rows| |cols|.
    rounding = relative_floor(accum_dtype(rows)) * overlap
    floor = (norms(rows, dims) * rounding * norms(cols, dims)).square()
    return torch.maximum(norm_sq, floor if dims == 1 else floor.sum(1))


def _total(x: Tensor) -> Tensor:
    return x[:, 0] if x.shape[1] == 1 else x.sum(1)


def _ghost_norm_sq(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B, G] as sum_{t,t'} <r_t, r_t'> <c_t, c_t'>, and sum_t |r_t| |c_t|, to which rounding is relative.

    By symmetry each block of positions meets only itself and, counted twice, the blocks before it. Goodfellow 2015,
    arXiv:1510.01799; Li et al. 2022, arXiv:2110.05679.
    """
    B, G, T, _ = rows.shape
    rows, cols = rows.flatten(0, 1), cols.flatten(0, 1)
    size = max(1, -(-T // blocks(T, rows.device)))
    terms, scales = [], []
    for start in range(0, max(1, T), size):
        stop = min(T, start + size)
        product = gram(cols, start, stop).mul_(gram(rows, start, stop))
        scales.append(product.diagonal(start, 1, 2).sqrt())
        if start:
            product[..., :start].mul_(2)
        terms.append(product.sum((1, 2)))
    norm_sq, scale = functools.reduce(torch.add, terms), torch.cat(scales, 1).sum(1)
    return norm_sq.view(B, G) + hidden(T * T, rows.dtype), scale.view(B, G)
