"""Collectives that several back-ends use."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.errors import BatchLayoutError

PATIENCE = 300.0
"""Seconds before a waiting rank raises."""

# torch 2.13 renamed it and warns about the old name.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_meetings: Counter[str] = Counter()


def meet_for_probe(group: dist.ProcessGroup) -> None:
    """Wait until all ranks begin a probe, which gathers parameters; raise BatchLayoutError after PATIENCE."""
    store = dist.distributed_c10d._get_default_store()
    ranks = hashlib.sha256(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()
    key = f"dpshard/probe/{ranks}/{_meetings[ranks]}"
    _meetings[ranks] += 1
    store.add(key, 1)
    deadline = time.monotonic() + PATIENCE
    while int(store.add(key, 0)) < dist.get_world_size(group):
        if time.monotonic() > deadline:
            raise BatchLayoutError(
                f"On rank {dist.get_rank(group)} the model runs a forward of a new kind (other functions on its "
                f"parameters, or other inputs), but not on other ranks. If parameters are sharded, all ranks must do "
                f"so together. Remove control flow that depends on the data or on random numbers of a rank: a skipped "
                f"layer, an input that only some micro-batches have. Or train under DDP."
            )
        time.sleep(0.01)


_BUCKET = 1 << 25
"""Elements that one collective sums."""


def sum_in_place(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum real tensors over ranks; bitwise equal on all ranks."""
    for bucket in _buckets(tensors):
        flat = torch.cat([x.flatten() for x in bucket])
        dist.all_reduce(flat, group=group)
        for x, summed in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(summed.view(x.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for x in tensors:
        bucket = alike[x.dtype, x.device]
        if bucket and sum(y.numel() for y in bucket) + x.numel() > _BUCKET:
            yield bucket
            bucket = alike[x.dtype, x.device] = []
        bucket.append(x)
    yield from alike.values()
