"""The kernels as operators of torch."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dpshard::ghost_norm_sq", mutates_args=())
def ghost_norm_sq(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of sum_t rows_t (x) cols_t, and sum_t |rows_t| |cols_t|, by group [B, G], float32.

    Squared norms include what underflow may hide. Rows [B, G, T, R] and cols [B, G, T, C] have one half-precision
    dtype; see `supports_product`.
    """
    from dpshard.kernels.triton import gram  # needs Triton

    with torch.cuda.device_of(rows):  # Triton launches on the current device
        return gram.ghost_norm_sq(rows, cols)


@torch.library.custom_op("dpshard::gradient_norm_sq", mutates_args=())
def gradient_norm_sq(rows: Tensor, cols: Tensor) -> Tensor:
    """Squared norms [B], float32, over all groups, without storing gradients."""
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        return product.squares(rows, cols, keep=False)[0]


@torch.library.custom_op("dpshard::per_sample", mutates_args=())
def per_sample(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients sum_t rows_t (x) cols_t [B, G, R, C] and their squared norms [B], float32."""
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        squares, gradients = product.squares(rows, cols, keep=True)
    return gradients, squares


@torch.library.custom_op("dpshard::weighted_sum", mutates_args=())
def weighted_sum(rows: Tensor, cols: Tensor, factors: Tensor) -> Tensor:
    """sum_i factors_i * gradient_i, [G, R, C], float32, with float32 factors [B].

    A factor of 0 leaves out even a NaN.
    """
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        return product.weighted_sum(rows, cols, factors)


@torch.library.custom_op("dpshard::release_", mutates_args=("x",))
def release_(x: Tensor, streams: Tensor, weights: Tensor, block: int, start: int, std: float, divisor: float) -> Tensor:
    """Turn x [n] (float32, contiguous) into (x + std * noise) / divisor in place; return |x|^2 before, [], float64.

    philox.py defines the normals; noise is their sum over vectors, with `weights` (float32 [vectors]). x holds elements
    [start, start + n) of a tensor. Every `block` of its elements (a multiple of 2 * philox.HALF) has its own streams.
    `streams` (int64 [vectors, ., 3], contiguous): those that meet x.
    """
    from dpshard.kernels.triton import gaussian

    with torch.cuda.device_of(x):
        return gaussian.release_(x, streams, weights, block, start, std, divisor)


def _norms(rows: Tensor, dims: int = 1) -> Tensor:
    return rows.new_empty(rows.shape[:dims], dtype=torch.float32)


def _gradients(rows: Tensor, cols: Tensor, *samples: int) -> Tensor:
    return rows.new_empty(*samples, rows.shape[1], rows.shape[3], cols.shape[3], dtype=torch.float32)


ghost_norm_sq.register_fake(lambda rows, cols: (_norms(rows, 2), _norms(rows, 2)))
gradient_norm_sq.register_fake(lambda rows, cols: _norms(rows))
per_sample.register_fake(lambda rows, cols: (_gradients(rows, cols, len(rows)), _norms(rows)))
release_.register_fake(lambda x, *_: x.new_empty((), dtype=torch.float64))
weighted_sum.register_fake(lambda rows, cols, factors: _gradients(rows, cols))
