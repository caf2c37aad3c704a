"""A digest of the bits of an array under secret weights, by compiled code; dpshard/noise/digest.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from dpshard.kernels.native.library import library, team

WIDTH = 4096
"""Words of a row; see digest.c."""


def supports_digest(words: Tensor) -> bool:
    """Return True if compiled code supports `words`: on the CPU, and not fake."""
    return words.device.type == "cpu" and type(words) is Tensor and library() is not None


def add_digest_(total: Tensor, words: Tensor, at: int, columns: Tensor, rows: Tensor) -> None:
    """Add to `total` [2], int64, the digest of `words` [n], int32; `at`: place of the first word in its row.

    Columns are [2, WIDTH], int32; rows [-(-(at + n) // WIDTH), 2], int64; all contiguous. Raises ValueError otherwise;
    call `supports_digest` first.
    """
    compiled = library()
    kinds = [x.dtype for x in (total, rows, words, columns)]
    if compiled is None or kinds != [torch.int64] * 2 + [torch.int32] * 2 or len(rows) * WIDTH < at + len(words):
        raise ValueError(f"No digest of {kinds} with {len(rows)} rows for {at} + {len(words)} words here.")
    compiled.digest(words.data_ptr(), len(words), at, columns.data_ptr(), rows.data_ptr(), total.data_ptr(), team())
