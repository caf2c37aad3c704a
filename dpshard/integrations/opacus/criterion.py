"""The criterion of `make_private` with grad_sample_mode="ghost"."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpshard.config import LossReduction
from dpshard.errors import ConfigurationError


class DPLoss:
    """A criterion reduced sample by sample; its value is a tensor.

    torch's "mean" divides by the positions or class weights of the whole batch, which mixes samples.
    """

    def __init__(self, criterion: Any, loss_reduction: LossReduction) -> None:
        if getattr(criterion, "reduction", None) != loss_reduction:
            raise ConfigurationError(
                f"The criterion has reduction={getattr(criterion, 'reduction', None)!r} and make_private has "
                f"loss_reduction={loss_reduction!r}. Pass a loss module of torch.nn with the reduction of make_private."
            )
        self.criterion = copy.copy(criterion)
        self.criterion.reduction = "none"
        self.reduction = loss_reduction

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """Return the mean or sum [] over samples (dimension 0) of their own losses.

        `shape`: that of logits [B, T, ...] if B and T were flattened.
        """
        losses = self.criterion(*args, **kwargs)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(losses, Tensor) or losses.dim() == 0:
            raise ConfigurationError(
                f"{type(self.criterion).__name__} does not return one loss per sample under reduction='none'."
            )
        if shape is not None and len(losses) == shape[0] * shape[1]:
            losses = losses.reshape(shape[0], -1)
        per_sample = losses.reshape(len(losses), -1)
        if self.reduction == "sum":
            return per_sample.sum()
        ignored = getattr(self.criterion, "ignore_index", None)
        counts: Any = per_sample.shape[1]
        if ignored is not None and isinstance(target, Tensor) and target.numel() == per_sample.numel():
            counts = (target != ignored).view_as(per_sample).sum(1).clamp(min=1)
        return (per_sample.sum(1) / counts).mean()
