"""Records in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from dpshard.records.record import Record


def offloaded(record: Record) -> Record:
    """Return `record` in pinned host memory; the copy is asynchronous."""
    return _with(record, _to_host)


def fetched(record: Record, device: torch.device) -> Record:
    """Return an offloaded record on `device`."""
    return _with(record, lambda x: x.to(device, non_blocking=True))


def _with(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    tensors = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: change(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    # Copies run on the current stream, so no operator reuses `x` or reads the copy too early.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
