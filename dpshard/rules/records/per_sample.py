"""Records that hold the per-sample gradients themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.rules.records.numerics import blank, flat, wide


@dataclass(frozen=True, slots=True)
class PerSample:
    """Per-sample gradients [B, *shape] of a parameter of shape [*shape]."""

    gradient: Tensor

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], float32 or float64."""
        return torch.linalg.vector_norm(flat(self.gradient), dim=1).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return wide(self.gradient)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        rows = flat(self.gradient)
        return (factor_B.to(rows.dtype) @ rows).view(self.gradient.shape[1:])

    def without(self, dead_B: Tensor) -> PerSample:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        return PerSample(blank(self.gradient, dead_B))
