"""The ghost norm, by tiles of two symmetric Gram matrices. Needs Triton.

Each program multiplies the tiles of both for blocks i >= j, and writes the sum of the product. The sum counts twice off
the diagonal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpshard.kernels.triton.common import factor_of_dot
from dpshard.kernels.triton.tiles import ghost_tile, triangle
from dpshard.kernels.underflow import hidden

_CHUNK = 1024
"""Products in one sum on tensor cores, where each addition may lose the last bit."""


@triton.jit
def _gram_tile(x, i, j, n, T, stride_t, stride_n, TILE: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """Return inner products [TILE, TILE] of the rows i and j (positions, int64 [TILE]) of x [T, n]."""
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    left = x + i[:, None] * stride_t
    right = x + j[:, None] * stride_t
    for first in range(0, n, CHUNK):
        part = tl.zeros((TILE, TILE), dtype=tl.float32)
        for start in range(first, min(first + CHUNK, n), STEP):
            at = start + tl.arange(0, STEP)
            offset = at.to(tl.int64)[None, :] * stride_n
            a = tl.load(left + offset, mask=(i < T)[:, None] & (at < n)[None, :], other=0.0)
            b = tl.load(right + offset, mask=(j < T)[:, None] & (at < n)[None, :], other=0.0)
            part = tl.dot(factor_of_dot(a), tl.trans(factor_of_dot(b)), part)
        total += part
    return total


@triton.jit
def _ghost_norm_sq(
    rows,
    cols,
    products,
    scales,
    G,
    T,
    R,
    C,
    tiles,
    hidden_rows,
    hidden_cols,
    rows_b,
    rows_g,
    rows_t,
    rows_r,
    cols_b,
    cols_g,
    cols_t,
    cols_c,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the sum of a tile of the Gram product, and of the roots of its diagonal.

    Line `short` of the triangle of tiles and its counterpart have a constant total length. So such pairs of lines fill
    a rectangle of programs.
    """
    pid = tl.program_id(0)
    width = tiles + 1 - tiles % 2
    pairs = tiles * (tiles + 1) // 2
    line = (pid % pairs) // width
    at = (pid % pairs) % width
    short = line - tiles % 2
    i = tl.where(at <= short, short, tiles - 1 - line)
    j = tl.where(at <= short, at, at - short - 1)
    sample = (pid // pairs).to(tl.int64)
    b = sample // G
    g = sample % G
    t = i.to(tl.int64) * TILE + tl.arange(0, TILE)
    s = j.to(tl.int64) * TILE + tl.arange(0, TILE)
    gram_rows = _gram_tile(rows + b * rows_b + g * rows_g, t, s, R, T, rows_t, rows_r, TILE, STEP, CHUNK)
    gram_cols = _gram_tile(cols + b * cols_b + g * cols_g, t, s, C, T, cols_t, cols_c, TILE, STEP, CHUNK)
    same = t[:, None] == s[None, :]
    product = (gram_rows + tl.where(same, hidden_rows, 0.0)) * (gram_cols + tl.where(same, hidden_cols, 0.0))
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(products + pid, tl.sum(product) * times)
    if i == j:
        diagonal = tl.sum(tl.where(same, product, 0.0), 1)
        tl.store(scales + sample * tiles + i, tl.sum(tl.sqrt(diagonal), 0))


@triton.jit
def _bounded(products, scales, bounds, G, pairs, tiles, floor, hidden_sum, STEP: tl.constexpr):
    """Add up the tiles of one sample, and write the sum over groups of max(|norm_sq|, floor * scale^2); NaN stays."""
    sample = tl.program_id(0).to(tl.int64)
    total = 0.0
    for g in range(G):
        place = sample * G + g
        norm_sq = tl.zeros((STEP,), dtype=tl.float32)
        for start in range(0, pairs, STEP):
            at = start + tl.arange(0, STEP)
            norm_sq += tl.load(products + place * pairs + at, mask=at < pairs, other=0.0)
        scale = tl.zeros((STEP,), dtype=tl.float32)
        for start in range(0, tiles, STEP):
            at = start + tl.arange(0, STEP)
            scale += tl.load(scales + place * tiles + at, mask=at < tiles, other=0.0)
        measured = tl.abs(tl.sum(norm_sq, 0) + hidden_sum)
        least = floor * tl.sum(scale, 0) * tl.sum(scale, 0)
        bound = tl.where(measured >= least, measured, least)
        total += tl.where(measured != measured, measured, bound)
    tl.store(bounds + sample, total)


def ghost_norm_sq(rows: Tensor, cols: Tensor, floor: float) -> Tensor:
    """Launch the kernels; see operators.ghost_norm_sq."""
    (B, G, T, R), C = rows.shape, cols.shape[3]
    TILE = ghost_tile(B * G, T)
    tiles, pairs = -(-T // TILE), triangle(T, TILE)
    products = torch.empty(B * G * pairs, dtype=torch.float32, device=rows.device)
    scales = torch.empty(B * G * tiles, dtype=torch.float32, device=rows.device)
    _ghost_norm_sq[(B * G * pairs,)](
        rows,
        cols,
        products,
        scales,
        G,
        T,
        R,
        C,
        tiles,
        hidden(T * R, torch.float32),
        hidden(T * C, torch.float32),
        *rows.stride(),
        *cols.stride(),
        TILE=TILE,
        STEP=min(128, 4096 // TILE),
        CHUNK=_CHUNK,
        num_warps=8 if TILE == 128 else 4,
        num_stages=3,
    )
    bounds = torch.empty(B, dtype=torch.float32, device=rows.device)
    at_end = hidden(T * T, torch.float32)
    _bounded[(B,)](products, scales, bounds, G, pairs, tiles, floor, at_end, STEP=1024, num_warps=4)
    return bounds
