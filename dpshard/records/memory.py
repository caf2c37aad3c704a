"""A buffer that per-sample gradients reuse, because fresh pages cost more time than writing the numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_TIMES_TOO_LARGE = 2
"""Largest ratio of buffer to request: small gradients that wait for other layers would pin a large buffer."""


class _Held(threading.local):
    buffer: Tensor | None = None
    references = 0
    """References to the buffer's memory while nothing else uses it."""
    backward = -1
    """Number of the pass; its end releases the buffer."""


_held = _Held()


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the device of `like`, in the buffer if nothing refers to it.

    Each thread holds one buffer until its backward pass ends. Layers that are clipped one by one reuse it; gradients
    that wait for other layers keep their memory.
    """
    backward = torch._C._current_graph_task_id()
    if type(like) is not Tensor or like.device.type != "cpu" or backward == -1:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if backward != _held.backward:
        torch.autograd.Variable._execution_engine.queue_callback(_let_go)
        _held.backward = backward
    n = torch.Size(shape).numel() * dtype.itemsize
    if _held.buffer is not None and _held.buffer.nbytes > _TIMES_TOO_LARGE * n:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if _held.buffer is None or _held.buffer.nbytes < n or _references(_held.buffer) > _held.references:
        _held.buffer = torch.empty(n, dtype=torch.uint8, device=like.device)
        # The smaller of two, in case torch's first count differs: too few references are safe, too many are not.
        _held.references = min(_references(_held.buffer), _references(_held.buffer))
    return _held.buffer[:n].view(dtype).view(shape)


def _references(x: Tensor) -> int:
    """Return the number of tensors that use the memory of `x`, plus torch's own references during the call."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def _let_go() -> None:
    _held.buffer, _held.backward = None, -1
