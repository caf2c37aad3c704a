"""Records that wait in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from dpshard.records.record import Record


def offloaded(record: Record) -> Record:
    """Return `record` in pinned memory of the host, so that nothing waits for the copy."""
    return _with(record, _to_host)


def fetched(record: Record, device: torch.device) -> Record:
    """Return an offloaded record, back on `device`."""
    return _with(record, lambda x: x.to(device, non_blocking=True))


def _with(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    tensors = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: change(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    # Both ways on the current stream: no operator takes the memory of `x`, or reads the copy, before it is through.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
