"""Digests of the bits of arrays under secret weights; dpshard/noise/digest.py defines them. Needs Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.triton import tables

_TILE = 1024
"""Columns of a program."""
_MOST = 16
"""Rows of a program in large arrays: its columns are read, and its sums added, once."""
_GROUPS = 128
"""Groups of rows that keep a GPU busy, about."""


@triton.jit
def _add_digests(stretches, owners, column_weights, row_weights, lanes, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Add the digest of a tile of columns in a group of rows. Integers wrap around, so atomic sums are exact.

    The stretch of a group is its owner. It has an address, n, the place of the first word in its row, and a number of
    rows. Then come the rows of a group, and the numbers of its first row and group. Rows are weighted before columns:
    modulo 2^64 that is the same, and each lane needs one sum of vectors.
    """
    column = tl.program_id(0) % (WIDTH // TILE) * TILE + tl.arange(0, TILE)
    group = tl.program_id(0) // (WIDTH // TILE)
    stretch = stretches + 7 * tl.load(owners + group)
    words = tl.load(stretch).to(tl.pointer_type(tl.int32))
    n, at, count, of_group = tl.load(stretch + 1), tl.load(stretch + 2), tl.load(stretch + 3), tl.load(stretch + 4)
    weights = row_weights + 2 * tl.load(stretch + 5)
    first = (group - tl.load(stretch + 6)) * of_group
    one = tl.zeros((TILE,), dtype=tl.int64)
    other = tl.zeros((TILE,), dtype=tl.int64)
    for row in range(first, tl.minimum(first + of_group, count)):
        place = row * WIDTH - at + column
        word = tl.load(words + place, mask=(place >= 0) & (place < n), other=0).to(tl.int64)
        one += word * tl.load(weights + 2 * row)
        other += word * tl.load(weights + 2 * row + 1)
    one *= tl.load(column_weights + column).to(tl.int64)
    other *= tl.load(column_weights + WIDTH + column).to(tl.int64)
    tl.atomic_add(lanes, tl.sum(one, 0), sem="relaxed")
    tl.atomic_add(lanes + 1, tl.sum(other, 0), sem="relaxed")


def add_digests_(total: Tensor, words: Sequence[Tensor], at: Sequence[int], columns: Tensor, rows: Tensor) -> None:
    """Launch the kernel; see operators.add_digests_."""
    width = columns.shape[1]
    layout, owners = _layout(tuple(map(len, words)), tuple(at), width, total.device)
    stretches = tables.with_addresses(words, layout, torch.int32, total.device)
    grid = (len(owners) * (width // _TILE),)
    _add_digests[grid](stretches, owners, columns, rows, total, WIDTH=width, TILE=_TILE, num_warps=4)


@functools.lru_cache(maxsize=8)  # the same sums at every step
def _layout(
    sizes: tuple[int, ...], at: tuple[int, ...], width: int, device: torch.device
) -> tuple[NDArray[np.int64], Tensor]:
    """Return stretches without their addresses, and the owner of each group."""
    n, place = np.array(sizes, np.int64), np.array(at, np.int64)
    count = -(-(place + n) // width)
    of_group = np.clip(count // _GROUPS, 1, _MOST)
    groups = -(-count // of_group)
    layout = np.stack([n, place, count, of_group, tables.before(count), tables.before(groups)], 1)
    return layout, tables.owners(groups, device)
