"""Collectives that several back-ends use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has renamed it, and warns of the old name; looked up by name, since older ones lack the new one.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def from_rank_0(secret: bytes, group: dist.ProcessGroup | None, device: torch.device) -> bytes:
    """The bytes that rank 0 of `group` holds, on every rank."""
    shared = torch.tensor(list(secret), dtype=torch.uint8, device=device)
    dist.broadcast(shared, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return bytes(shared.cpu().tolist())
