"""Norms and weighted sums of rows, the per-sample gradients of one parameter. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpshard.kernels.underflow import hidden

_STEP = 2048
"""Elements of a row per step."""
_SAMPLES = 32
_ELEMENTS = 256
"""Elements per tile of a weighted sum."""


@triton.jit
def _row_norm_sq(x, squares, n, x_b, x_n, root, STEP: tl.constexpr):
    """Write the squared norm of one row, after `root` is added to the norm."""
    row = x + tl.program_id(0).to(tl.int64) * x_b
    total = tl.zeros((STEP,), dtype=tl.float32)
    for start in range(0, n, STEP):
        at = start + tl.arange(0, STEP)
        value = tl.load(row + at.to(tl.int64) * x_n, mask=at < n, other=0.0).to(tl.float32)
        total += value * value
    norm_sq = tl.sum(total, 0)
    # (norm + root)^2, written so that an approximate square root does not lower the result below norm^2.
    tl.store(squares + tl.program_id(0), norm_sq + 2 * root * tl.sqrt(norm_sq) + root * root)


@triton.jit
def _weighted_rows(x, weights, total, B, n, x_u, x_b, x_n, SAMPLES: tl.constexpr, ELEMENTS: tl.constexpr):
    """Write some elements of the weighted sum of one use's rows. It skips rows of weight 0, because 0 * NaN is NaN."""
    across = tl.cdiv(n, ELEMENTS)
    use = (tl.program_id(0) // across).to(tl.int64)
    at = (tl.program_id(0) % across).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    out = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for first in range(0, B, SAMPLES):
        b = first + tl.arange(0, SAMPLES)
        weight = tl.load(weights + use * B + b, mask=b < B, other=0.0)
        here = (weight != 0)[:, None] & (at < n)[None, :]
        value = tl.load(x + use * x_u + b.to(tl.int64)[:, None] * x_b + at[None, :] * x_n, mask=here, other=0.0).to(
            tl.float32
        )
        out += tl.sum(value * weight[:, None], 0)
    tl.store(total + use * n + at, out, mask=at < n)


def row_norm_sq(x: Tensor) -> Tensor:
    """Launch the kernel; see operators.row_norm_sq."""
    B, n = x.shape
    squares = torch.empty(B, dtype=torch.float32, device=x.device)
    root = hidden(n, torch.float32) ** 0.5
    _row_norm_sq[(B,)](x, squares, n, *x.stride(), root, STEP=_STEP, num_warps=4)
    return squares


def weighted_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Launch the kernel; see operators.weighted_rows."""
    uses, B, n = x.shape
    total = torch.empty(uses, n, dtype=torch.float32, device=x.device)
    _weighted_rows[(uses * triton.cdiv(n, _ELEMENTS),)](
        x,
        weights.contiguous(),
        total,
        B,
        n,
        *x.stride(),
        SAMPLES=_SAMPLES,
        ELEMENTS=_ELEMENTS,
        num_warps=4,
    )
    return total
