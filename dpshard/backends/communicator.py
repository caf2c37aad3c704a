"""Communication between ranks that share the data of a model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.backends.collectives import meet_for_probe


class Communicator:
    """The ranks that share the data of one model; by default, one process.

    All ranks call its methods in one order. `group` is called at first use, because it may create a process group.
    """

    def __init__(
        self,
        world_size: int = 1,
        group: Callable[[], dist.ProcessGroup | None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.world_size = world_size
        self._find_group, self._device = group, device

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        """Process group; None for one process."""
        if self._find_group is None:
            return None
        found = self._find_group()
        return dist.group.WORLD if found is None else found  # as in torch

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def broadcast(self, secret: bytes) -> bytes:
        """Bytes of rank 0."""
        if self.group is None:
            return secret
        shared = torch.tensor(list(secret), dtype=torch.uint8, device=self._device)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return bytes(shared.cpu().tolist())

    def all_gather(self, x_X: Tensor) -> Tensor:
        """Vectors of all ranks as rows [W, X]."""
        if self.group is None:
            return x_X[None]
        own_X = x_X.to(self._device)
        rows_WX = own_X.new_empty(self.world_size * len(own_X))  # a list would need a view per rank
        dist.all_gather_into_tensor(rows_WX, own_X, group=self.group)
        return rows_WX.view(self.world_size, -1)

    def mismatches(self, facts: Mapping[str, Any]) -> list[str]:
        """Names of the plain facts that differ between ranks."""
        digests = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in facts.values())
        own = torch.tensor(list(digests), dtype=torch.uint8, device="cpu")
        ranks_WFD = self.all_gather(own).cpu().unflatten(1, (len(facts), -1))
        agree_F = (ranks_WFD == ranks_WFD[0]).all(2).all(0)
        return [name for name, agree in zip(facts, agree_F.tolist(), strict=True) if not agree]

    def meet(self) -> None:
        """Wait until all ranks begin a probe, which gathers parameters."""
        if self.group is not None:
            meet_for_probe(self.group)


def all_ranks(device: torch.device) -> Communicator:
    """Return a communicator of the default group."""
    return Communicator(dist.get_world_size(), lambda: dist.group.WORLD, device)
