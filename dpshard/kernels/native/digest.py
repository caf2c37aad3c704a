"""A digest of the bits of an array under secret weights; dpshard/noise/digest.py defines it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.native.library import Table, addresses, columns, library

WIDTH = 4096
"""Words of a row; see digest.c."""


def supports_digest(tensors: Sequence[Tensor]) -> bool:
    """Return True if compiled code supports `tensors`."""
    return {*map(type, tensors)} <= {Tensor} and {x.is_cpu for x in tensors} <= {True} and library() is not None


class Stretches:
    """Stretches of words, without addresses: (words, place of the first in its row, weights of the rows [R, 2], int64).

    Raises ValueError if rows have no weights.
    """

    def __init__(self, stretches: Sequence[tuple[int, int, NDArray[np.int64]]]) -> None:
        self._rows = [np.ascontiguousarray(rows, np.int64) for _, _, rows in stretches]  # the table has their addresses
        words, ats = [n for n, _, _ in stretches], [at for _, at, _ in stretches]
        self._table = columns([0] * len(words), words, ats, [rows.ctypes.data for rows in self._rows])
        for n, at, rows in zip(words, ats, self._rows, strict=True):
            if len(rows) * WIDTH < at + n:
                raise ValueError(f"{n} words from {at} on have weights for {len(rows)} rows only.")

    def at(self, tensors: Sequence[Tensor]) -> Table:
        """Return a table for compiled code. Raises ValueError unless `tensors` are contiguous, of these sizes."""
        found = self._table.copy()
        found[:, 0] = np.fromiter(addresses(tensors), np.int64)
        words = [x.nbytes // 4 for x in tensors]
        if words != self._table[:, 1].tolist() or not all(map(Tensor.is_contiguous, tensors)):
            raise ValueError("The tensors have other words than these stretches, or are not contiguous.")
        return found


def add_digests_(total: Tensor, tensors: Sequence[Tensor], stretches: Stretches, columns: Tensor) -> None:
    """Add to `total` [2], int64, the digests of the words of `tensors`.

    Elements have 4 or 8 bytes. `columns` are [2, WIDTH], int32. All are contiguous. Raises ValueError otherwise.
    """
    compiled = library()
    if compiled is None or total.dtype != torch.int64 or columns.dtype != torch.int32:
        raise ValueError(f"Compiled code has no digest of {columns.dtype} columns into {total.dtype}.")
    compiled.digests(stretches.at(tensors), columns.data_ptr(), total.data_ptr())
