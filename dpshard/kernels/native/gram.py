"""Norms by Gram matrices on a CPU: see [Note: Native code]."""

from __future__ import annotations

import torch
from torch import Tensor

from dpshard.kernels.native.library import is_unobserved, library, supports_products

_TILE = 8, 16
"""Sides of a tile with AVX-512; AVX2 has half as many rows."""


def supports_ghost_norm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if compiled code supports ghost norms."""
    return supports_products(device, dtype)


def ghost_flops(T: int, R: int, C: int) -> int:
    """FLOPs of the ghost norm of a sample."""
    height, width = _TILE
    n, below = -(-T // width), -(-T // height) * height
    return n * (2 * below - width * (n - 1)) * width * (R + C)


def floored_ghost_norm_sq(rows: Tensor, cols: Tensor, relative_floor: float) -> Tensor:
    """Return upper bounds [B] of the squared norms of sum_t rows_t (x) cols_t over all groups.

    They include what underflow may hide. A group adds at least `relative_floor` (sum_t |rows_t| |cols_t|)^2. Rows [B,
    G, T, R] and cols [B, G, T, C] are float32. Raises ValueError otherwise.
    """
    function = _ghost_norms if is_unobserved(rows, cols) else _operator
    return function(rows, cols, relative_floor)


def _ghost_norms(rows: Tensor, cols: Tensor, relative_floor: float) -> Tensor:
    compiled = library()
    if compiled is None or not rows.dtype == cols.dtype == torch.float32 or rows.shape[:3] != cols.shape[:3]:
        raise ValueError(f"No ghost norm of {rows.dtype} {[*rows.shape]} and {cols.dtype} {[*cols.shape]} here.")
    sizes = (*rows.shape, cols.shape[3])
    if 0 in sizes:
        return rows.new_zeros(len(rows))
    norm_sq = rows.new_empty(len(rows))
    x, y = (rows.data_ptr(), rows.stride()), (cols.data_ptr(), cols.stride())
    compiled.ghost_norms(x, y, sizes, relative_floor, norm_sq.data_ptr())
    return norm_sq


# This is an operator of torch, so that fake tensors work and FLOPs are counted.
_operator = torch.library.custom_op("dpshard::ghost_norms", _ghost_norms, mutates_args=())
_operator.register_fake(lambda rows, cols, _: rows.new_empty(len(rows)))
