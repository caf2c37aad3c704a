"""A digest of the bits of an array under secret weights; dpshard/noise/digest.py defines it. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Columns of a program."""
_MOST = 16
"""Rows of a program in large arrays: its columns are read, and its sums added, once."""
_GROUPS = 128
"""Groups of rows that keep a GPU busy, about."""


@triton.jit(do_not_specialize=["count", "of_group"])
def _add_digest(
    words, column_weights, row_weights, lanes, n, at, count, of_group, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Add the digest of a tile of columns in `of_group` of the rows. Integers wrap around, so atomic sums are exact.

    Rows are weighted before columns: modulo 2^64 that is the same, and each lane needs one sum of vectors.
    """
    column = tl.program_id(0) % (WIDTH // TILE) * TILE + tl.arange(0, TILE)
    first = (tl.program_id(0) // (WIDTH // TILE)).to(tl.int64) * of_group
    one = tl.zeros((TILE,), dtype=tl.int64)
    other = tl.zeros((TILE,), dtype=tl.int64)
    for row in range(first, tl.minimum(first + of_group, count)):
        place = row * WIDTH - at + column
        word = tl.load(words + place, mask=(place >= 0) & (place < n), other=0).to(tl.int64)
        one += word * tl.load(row_weights + 2 * row)
        other += word * tl.load(row_weights + 2 * row + 1)
    one *= tl.load(column_weights + column).to(tl.int64)
    other *= tl.load(column_weights + WIDTH + column).to(tl.int64)
    tl.atomic_add(lanes, tl.sum(one, 0), sem="relaxed")
    tl.atomic_add(lanes + 1, tl.sum(other, 0), sem="relaxed")


def add_digest_(total: Tensor, words: Tensor, at: int, columns: Tensor, rows: Tensor) -> None:
    """Launch the kernel; see operators.add_digest_."""
    count, width = len(rows), columns.shape[1]
    of_group = min(max(count // _GROUPS, 1), _MOST)
    grid = (triton.cdiv(count, of_group) * (width // _TILE),)
    _add_digest[grid](
        words, columns, rows, total, len(words), at, count, of_group, WIDTH=width, TILE=_TILE, num_warps=4
    )
