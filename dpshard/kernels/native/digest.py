"""A digest of the bits of an array under secret weights, by compiled code; dpshard/noise/digest.py defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpshard.kernels.native.library import library, table, team

WIDTH = 4096
"""Words of a row; see digest.c."""


def supports_digest(words: Tensor) -> bool:
    """Return True if compiled code supports `words`: on the CPU, and not fake."""
    return words.device.type == "cpu" and type(words) is Tensor and library() is not None


def add_digests_(total: Tensor, stretches: Sequence[tuple[Tensor, int, Tensor]], columns: Tensor) -> None:
    """Add to `total` [2], int64, the digests of stretches (x; place of its first word in its row; rows).

    `x` has elements of 4 or 8 bytes; the words are those of its memory. Columns are [2, WIDTH], int32; rows
    [-(-(at + n) // WIDTH), 2], int64, for n words; all contiguous. Raises ValueError otherwise; call `supports_digest`
    first.
    """
    compiled = library()
    if compiled is None or total.dtype != torch.int64 or columns.dtype != torch.int32:
        raise ValueError(f"Compiled code has no digest of {columns.dtype} columns into {total.dtype}.")
    arguments = []
    for x, at, rows in stretches:
        n, most = x.numel() * x.itemsize // 4, rows.shape[0] * WIDTH
        if x.itemsize not in (4, 8) or rows.dtype != torch.int64 or most < at + n or not x.is_contiguous():
            raise ValueError(f"No digest of {x.dtype} with {rows.dtype} for {most} of {at} + {n} words here.")
        arguments.append((x.data_ptr(), n, at, rows.data_ptr()))
    compiled.digests(table(arguments), len(stretches), columns.data_ptr(), total.data_ptr(), team())
