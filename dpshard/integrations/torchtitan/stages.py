"""Pipelines: each rank has a stage of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpshard.losses import sample_losses


class DocumentLosses:
    """Loss of a part of a micro-batch: the mean over its documents, whose losses it keeps."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        """Return the loss, and no metrics."""
        losses_B = sample_losses(logits, targets)
        self._parts.append(losses_B.detach())
        return losses_B.mean(), None

    def take(self, rows: int) -> Tensor:
        """Return the losses of the last `rows` documents; before its first step a schedule also calls the loss."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)[-rows:]


class PipelinedDocuments:
    """The stages on the ranks of `mesh`."""

    def __init__(self, mesh: Any, schedule: Any, losses: DocumentLosses) -> None:
        self.mesh, self._schedule, self._losses = mesh, schedule, losses
        rank = mesh.get_local_rank()
        self._first, self._last = rank == 0, rank == mesh.size() - 1

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engine."""
        return {"model_parallel_group": self.mesh.get_group(), "model_parallel_parts": {"*": "stage"}}

    def train(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Run forward and backward; return losses [B] on the last stage."""
        inputs = (batch["input_ids"],) if self._first else ()
        self._schedule.step(
            *inputs,
            positions=batch["position_ids"],
            target=batch["targets"] if self._last else None,
            return_outputs=False,
        )
        return self._losses.take(len(batch["targets"])) if self._last else None
