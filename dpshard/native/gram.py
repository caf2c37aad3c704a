"""Norms by Gram matrices on a CPU: see [Note: Native code], and gram.c for how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dpshard.native.library import has_tiles, library, team

_TILE = 8, 16
"""Positions on the sides of a tile with AVX-512; with AVX2 it has half as many rows, and a few products fewer are made.
Of a Gram matrix, columns of tiles are made from the diagonal on."""


def takes_ghost_norm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled code takes ghost norms of rows and columns of `dtype` there."""
    return has_tiles(device, dtype)


def ghost_flops(T: int, R: int, C: int) -> int:
    """FLOPs of the ghost norm of a sample of T positions, R rows and C columns."""
    height, width = _TILE
    n, below = -(-T // width), -(-T // height) * height
    return n * (2 * below - width * (n - 1)) * width * (R + C)


def ghost_norm_sq(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B] of sum_t rows_t (x) cols_t over all groups, and sum_t |rows_t| |cols_t| [B], both float32.

    Rows [B, G, T, R] and cols [B, G, T, C] of any strides, float32; see `takes_ghost_norm`.
    """
    norm_sq, scale = _ghost_norms(rows, cols).unbind()
    return norm_sq, scale


@torch.library.custom_op("dpshard::ghost_norms", mutates_args=())
def _ghost_norms(rows: Tensor, cols: Tensor) -> Tensor:
    """Both [2, B]. An operator of torch, so that fake tensors pass through it and its products are counted."""
    compiled = library()
    if compiled is None or not rows.dtype == cols.dtype == torch.float32 or rows.shape[:3] != cols.shape[:3]:
        raise ValueError(f"No ghost norm of {rows.dtype} {[*rows.shape]} and {cols.dtype} {[*cols.shape]} here.")
    if min(rows.numel(), cols.numel()) == 0:
        return rows.new_zeros(2, len(rows))
    out, sizes = rows.new_empty(2, len(rows)), (*rows.shape, cols.shape[3])
    x, y = ((x.data_ptr(), x.stride()) for x in (rows, cols))
    compiled.ghost_norms(x, y, sizes, (out[0].data_ptr(), out[1].data_ptr()), team())
    return out


_ghost_norms.register_fake(lambda rows, cols: rows.new_empty(2, len(rows)))


@register_flop_formula(torch.ops.dpshard.ghost_norms)
def _flops(rows: Any, cols: Any, **_: Any) -> int:
    B, G, T, R = rows
    return B * G * ghost_flops(T, R, cols[3])
