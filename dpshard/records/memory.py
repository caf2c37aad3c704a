"""One buffer, used again for per-sample gradients: fresh pages cost more time than writing the numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_TIMES_TOO_LARGE = 2
"""A buffer that is larger is not used: a small gradient that waits for other layers would keep all of it."""


class _Held(threading.local):
    """What a thread holds while it runs a backward pass."""

    buffer: Tensor | None = None
    references = 0
    """To the memory of the buffer, as long as nothing else has it."""
    backward = -1
    """Number of the pass; the buffer is let go at its end."""


_held = _Held()


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the device of `like`, in memory of an earlier one that nothing refers to.

    One buffer is held until the backward pass ends. Layers that are clipped one by one so fill the same memory; that
    of gradients which wait for other layers stays theirs.
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
        # Of two, should torch count otherwise when it is asked for the first time: too few are safe, too many are not.
        _held.references = min(_references(_held.buffer), _references(_held.buffer))
    return _held.buffer[:n].view(dtype).view(shape)


def _references(x: Tensor) -> int:
    """How many tensors have the memory of `x`, and what torch counts besides while it is asked."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def _let_go() -> None:
    _held.buffer, _held.backward = None, -1
