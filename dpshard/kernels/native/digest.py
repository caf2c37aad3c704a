"""A digest of the bits of an array under secret weights; dpshard/noise/digest.py defines it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.native.library import library, table, team

WIDTH = 4096
"""Words of a row; see digest.c."""


def supports_digest(words: Tensor) -> bool:
    """Return True if compiled code supports `words`."""
    return words.device.type == "cpu" and type(words) is Tensor and library() is not None


class Weights:
    """`rows` [R, 2], int64, of consecutive rows."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = np.ascontiguousarray(rows, np.int64)
        self.address, self.words = self.rows.ctypes.data, len(rows) * WIDTH


def add_digests_(total: Tensor, stretches: Sequence[tuple[Tensor, int, Weights]], columns: Tensor) -> None:
    """Add to `total` [2], int64, the digests of stretches (x; place of its first word in its row; weights of its rows).

    Elements of `x` have 4 or 8 bytes; columns are [2, WIDTH], int32; all are contiguous. Raises ValueError otherwise.
    """
    compiled = library()
    if compiled is None or total.dtype != torch.int64 or columns.dtype != torch.int32:
        raise ValueError(f"Compiled code has no digest of {columns.dtype} columns into {total.dtype}.")
    arguments = []
    for x, at, weights in stretches:
        itemsize = x.itemsize
        n = x.numel() * itemsize // 4
        if itemsize not in (4, 8) or weights.words < at + n or not x.is_contiguous():
            raise ValueError(f"No digest of {n} words of {x.dtype} from {at} on, with {weights.words} weights, here.")
        arguments.append((x.data_ptr(), n, at, weights.address))
    compiled.digests(table(arguments), len(arguments), columns.data_ptr(), total.data_ptr(), team())
