"""One number for each of many tensors, in one call: a sum over its bits, or its squared norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpshard.kernels.native.library import library, table, team


def supports_sums(tensors: Sequence[Tensor]) -> bool:
    """Return True if compiled code supports `tensors`: contiguous ones on the CPU, and not fake."""
    return library() is not None and all(type(x) is Tensor and x.is_cpu and x.is_contiguous() for x in tensors)


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of w + w^2 over the words w of each tensor, int64 [N]; it wraps around.

    Words have 16 bits where elements have 2 bytes, else 32. Raises ValueError for elements of one byte; call
    `supports_sums` first.
    """
    found = np.empty(len(tensors), np.int64)
    _library(tensors, (2, 4, 8, 16)).checksums(_arrays(tensors), len(tensors), found.ctypes.data, team())
    return torch.from_numpy(found)


def norms_sq(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of each tensor, float64 [N], summed in float64.

    Raises ValueError unless all are float32 or float64; call `supports_sums` first.
    """
    found = np.empty(len(tensors), np.float64)
    compiled = _library(tensors, (4, 8))
    if not all(x.dtype in (torch.float32, torch.float64) for x in tensors):
        raise ValueError("Compiled code takes norms of float32 and float64 only.")
    compiled.norms_sq(_arrays(tensors), len(tensors), found.ctypes.data, team())
    return torch.from_numpy(found)


def _library(tensors: Sequence[Tensor], sizes: tuple[int, ...]):
    compiled = library()
    if compiled is None or any(x.itemsize not in sizes for x in tensors):
        raise ValueError(f"Compiled code has no sums over elements of other than {sizes} bytes.")
    return compiled


def _arrays(tensors: Sequence[Tensor]):
    return table([(x.data_ptr(), x.numel(), x.itemsize) for x in tensors])
