"""One number for each of many tensors, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from dpshard.kernels.native.library import Library, Table, addresses, columns, library, sizes


def supports_sums(tensors: Iterable[Tensor]) -> bool:
    """Return True if compiled code supports `tensors`: contiguous ones on the CPU, and not fake."""
    tensors = list(tensors)
    if not {*map(type, tensors)} <= {Tensor, Parameter} or not all(map(Tensor.is_contiguous, tensors)):
        return False
    return {x.is_cpu for x in tensors} <= {True} and library() is not None


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of w + w^2 over the words w of each tensor, int64 [N]; it wraps around.

    Words have 16 bits where elements have 2 bytes, else 32. Raises ValueError for elements of one byte.
    """
    found = np.empty(len(tensors), np.int64)
    compiled, arrays = _called(tensors)
    if 1 in arrays[:, 2]:
        raise ValueError("Compiled code has no checksums of single bytes.")
    compiled.checksums(arrays, found.ctypes.data)
    return torch.from_numpy(found)


def norms_sq(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of each tensor, float64 [N], summed in float64.

    Raises ValueError unless all are float32 or float64.
    """
    found = np.empty(len(tensors), np.float64)
    compiled, arrays = _called(tensors)
    if not {x.dtype for x in tensors} <= {torch.float32, torch.float64}:
        raise ValueError("Compiled code takes norms of float32 and float64 only.")
    compiled.norms_sq(arrays, found.ctypes.data)
    return torch.from_numpy(found)


def _called(tensors: Sequence[Tensor]) -> tuple[Library, Table]:
    compiled = library()
    if compiled is None:
        raise ValueError("There is no compiled code: call supports_sums first.")
    return compiled, columns(addresses(tensors), sizes(tensors), [x.itemsize for x in tensors])
