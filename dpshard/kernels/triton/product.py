"""Tiles of the gradients sum_t rows_t (x) cols_t of one sample. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpshard.kernels.triton.common import factor_of_dot
from dpshard.kernels.triton.tiles import gradient_tile
from dpshard.kernels.underflow import hidden

_STEP = 32
"""Positions per step: three steps of two tiles fit into any GPU's shared memory."""


@triton.jit
def _gradient_tile(
    rows,
    cols,
    r,
    c,
    T,
    R,
    C,
    rows_t,
    rows_r,
    cols_t,
    cols_c,
    R_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return elements r x c (int64 [R_TILE], [C_TILE]) of the gradient [R, C] of one sample and group, float32."""
    total = tl.zeros((R_TILE, C_TILE), dtype=tl.float32)
    for start in range(0, T, STEP):
        t = start + tl.arange(0, STEP)
        here = (t < T)[:, None]
        at = t.to(tl.int64)[:, None]
        a = tl.load(rows + at * rows_t + r[None, :] * rows_r, mask=here & (r < R)[None, :], other=0.0)
        b = tl.load(cols + at * cols_t + c[None, :] * cols_c, mask=here & (c < C)[None, :], other=0.0)
        total = tl.dot(tl.trans(factor_of_dot(a)), factor_of_dot(b), total)
    return total


@triton.jit
def _squares(
    rows,
    cols,
    gradients,
    squares,
    G,
    T,
    R,
    C,
    rows_b,
    rows_g,
    rows_t,
    rows_r,
    cols_b,
    cols_g,
    cols_t,
    cols_c,
    KEEP: tl.constexpr,
    R_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the sum of squares of a tile of the gradient; with `KEEP`, also the tile."""
    pid = tl.program_id(0)
    across = tl.cdiv(C, C_TILE)
    tiles = tl.cdiv(R, R_TILE) * across
    sample = (pid // tiles).to(tl.int64)
    b = sample // G
    g = sample % G
    r = (pid % tiles // across).to(tl.int64) * R_TILE + tl.arange(0, R_TILE)
    c = (pid % tiles % across).to(tl.int64) * C_TILE + tl.arange(0, C_TILE)
    x = rows + b * rows_b + g * rows_g
    y = cols + b * cols_b + g * cols_g
    tile = _gradient_tile(x, y, r, c, T, R, C, rows_t, rows_r, cols_t, cols_c, R_TILE, C_TILE, STEP)
    # Written in two steps, Triton 3.7 cannot compile this for capability 10.0.
    tl.store(squares + pid, tl.sum(tile * tile))
    if KEEP:
        place = gradients + sample * R * C + r[:, None] * C + c[None, :]
        tl.store(place, tile, mask=(r < R)[:, None] & (c < C)[None, :])


@triton.jit
def _weighted_sum(
    rows,
    cols,
    factors,
    total,
    B,
    T,
    R,
    C,
    rows_b,
    rows_g,
    rows_t,
    rows_r,
    cols_b,
    cols_g,
    cols_t,
    cols_c,
    R_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write one tile of the weighted sum over samples, of one group.

    The factor multiplies float32 sums, because half-precision rows would round it. A factor of 0 skips a NaN.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(C, C_TILE)
    tiles = tl.cdiv(R, R_TILE) * across
    g = (pid // tiles).to(tl.int64)
    r = (pid % tiles // across).to(tl.int64) * R_TILE + tl.arange(0, R_TILE)
    c = (pid % tiles % across).to(tl.int64) * C_TILE + tl.arange(0, C_TILE)
    x = rows + g * rows_g
    y = cols + g * cols_g
    out = tl.zeros((R_TILE, C_TILE), dtype=tl.float32)
    for b in range(B):
        factor = tl.load(factors + b)
        if factor != 0:
            tile = _gradient_tile(x, y, r, c, T, R, C, rows_t, rows_r, cols_t, cols_c, R_TILE, C_TILE, STEP)
            out += tile * factor
        x += rows_b
        y += cols_b
    place = total + g * R * C + r[:, None] * C + c[None, :]
    tl.store(place, out, mask=(r < R)[:, None] & (c < C)[None, :])


def squares(rows: Tensor, cols: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return squared norms [B], and gradients [B, G, R, C] if `keep`."""
    (B, G, T, R), C = rows.shape, cols.shape[3]
    R_TILE, C_TILE = gradient_tile(B * G, R, C)
    tiles = triton.cdiv(R, R_TILE) * triton.cdiv(C, C_TILE)
    sums = torch.empty(B * G * tiles, dtype=torch.float32, device=rows.device)
    gradients = torch.empty((B, G, R, C) if keep else 0, dtype=torch.float32, device=rows.device)
    _squares[(B * G * tiles,)](
        rows,
        cols,
        gradients,
        sums,
        G,
        T,
        R,
        C,
        *rows.stride(),
        *cols.stride(),
        KEEP=keep,
        R_TILE=R_TILE,
        C_TILE=C_TILE,
        STEP=_STEP,
        num_warps=_warps(R_TILE, C_TILE),
        num_stages=3,
    )
    return sums.view(B, -1).sum(1) + hidden(G * R * C, sums.dtype), gradients


def weighted_sum(rows: Tensor, cols: Tensor, factors: Tensor) -> Tensor:
    """Launch the kernel; see operators.weighted_sum."""
    (B, G, T, R), C = rows.shape, cols.shape[3]
    R_TILE, C_TILE = gradient_tile(G, R, C)
    total = torch.empty(G, R, C, dtype=torch.float32, device=rows.device)
    _weighted_sum[(G * triton.cdiv(R, R_TILE) * triton.cdiv(C, C_TILE),)](
        rows,
        cols,
        factors.contiguous(),
        total,
        B,
        T,
        R,
        C,
        *rows.stride(),
        *cols.stride(),
        R_TILE=R_TILE,
        C_TILE=C_TILE,
        STEP=_STEP,
        num_warps=_warps(R_TILE, C_TILE),
        num_stages=3,
    )
    return total


def _warps(R_TILE: int, C_TILE: int) -> int:
    return 8 if R_TILE * C_TILE > 64 * 64 else 4
