"""Tables by which the programs of one launch find their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def with_addresses(
    tensors: Sequence[Tensor], layout: NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return rows int64 [tensors, 1 + columns] on `device`: the address of each tensor, and its row of `layout`.

    The host does not wait for the copy. Raises TypeError unless the tensors are contiguous, of `dtype` and on `device`:
    a kernel that is given addresses cannot tell.
    """
    if {(x.dtype, x.device, x.is_contiguous()) for x in tensors} != {(dtype, device, True)}:
        raise TypeError(f"The kernel takes contiguous tensors of {dtype} on {device}.")
    rows = np.empty((len(layout), 1 + layout.shape[1]), np.int64)
    rows[:, 0], rows[:, 1:] = [x.data_ptr() for x in tensors], layout
    host = torch.from_numpy(rows)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def owners(programs: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the number of its tensor for each program, int32 [sum of programs]; `programs`: how many a tensor has."""
    numbers = np.arange(len(programs), dtype=np.int32)
    return torch.from_numpy(np.repeat(numbers, programs)).to(device)


def before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry the sum of those before it."""
    return np.cumsum(counts) - counts
