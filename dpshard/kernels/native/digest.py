"""A digest of the bits of an array under secret weights, by compiled code; dpshard/noise/digest.py defines it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dpshard.kernels.native.library import library, team

WIDTH = 4096
"""Words of a row; see digest.c."""


def supports_digest(words: Tensor) -> bool:
    """Return True if compiled code supports `words`: on the CPU, and not fake."""
    return words.device.type == "cpu" and type(words) is Tensor and library() is not None


def add_digests_(total: Tensor, stretches: Iterable[tuple[Tensor, int, Tensor]], columns: Tensor) -> None:
    """Add to `total` [2], int64, the digests of stretches (words [n], int32; place of the first in its row; rows).

    Columns are [2, WIDTH], int32; rows [-(-(at + n) // WIDTH), 2], int64; all contiguous. Raises ValueError otherwise;
    call `supports_digest` first.
    """
    compiled, threads = library(), team()
    if compiled is None or total.dtype != torch.int64 or columns.dtype != torch.int32:
        raise ValueError(f"Compiled code has no digest of {columns.dtype} columns into {total.dtype}.")
    to, weights = total.data_ptr(), columns.data_ptr()
    for words, at, rows in stretches:
        n, most = words.numel(), rows.shape[0] * WIDTH
        if words.dtype != torch.int32 or rows.dtype != torch.int64 or most < at + n:
            raise ValueError(f"No digest of {words.dtype} with {rows.dtype} for {most} of {at} + {n} words here.")
        compiled.digest(words.data_ptr(), n, at, weights, rows.data_ptr(), to, threads)
