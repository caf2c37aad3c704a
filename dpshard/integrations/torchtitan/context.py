"""Context parallelism: each rank has a part of every document."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed.context_parallel import cp_shard

from dpshard.losses import sample_losses
from dpshard.sampling.packing import IGNORED


class DocumentParts:
    """The ranks of `mesh`, which divide documents by torchtitan's `balancer`."""

    def __init__(self, mesh: Any, balancer: str | None) -> None:
        self._mesh, self._balancer = mesh, balancer

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engine."""
        return {"model_parallel_group": self._mesh.get_group(), "model_parallel_parts": {"*": "sum"}}

    def own(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of tensors [B, T]."""
        parts, _ = cp_shard(self._mesh, tuple(batch.values()), None, self._balancer)
        return dict(zip(batch, parts, strict=True))

    def terms(self, logits: Tensor, own: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's terms [B] of the documents' mean losses, of its part `own` of `targets` [B, T]."""
        return sample_losses(logits, own, per="sample-sum") / (targets != IGNORED).sum(1).clamp(min=1)

    def whole(self, terms_B: Tensor) -> Tensor:
        """Return the losses [B], for the log."""
        losses_B = terms_B.detach().clone()
        dist.all_reduce(losses_B, group=self._mesh.get_group())
        return losses_B
