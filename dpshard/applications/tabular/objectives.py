"""The target of a table: classes, or a number within public bounds.

[Note: Weights and clipping] Automatic clipping scales every gradient to one norm. So a row that is right already weighs
as much as a wrong one. If one class is rare, the others win, with or without weights. Of 2,000 rows, 8.7% of them rare,
networks at epsilon 3 found 1% of the rare ones. Abadi's clipping leaves small gradients small: with weights it found 75
to 97%. So weighted classes take it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from dpshard.errors import ConfigurationError


class Objective(Protocol):
    """Losses and scores of outputs."""

    @property
    def outputs(self) -> int:
        """Outputs of the network."""
        ...

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return the loss [B] of each row; that of a row depends on no other."""
        ...


@dataclass(frozen=True)
class Classes:
    """Classes 0 .. count - 1, with public weights.

    Weights shift the logits in training by -log(weight): Menon et al. 2021, arXiv:2007.07314. Weights of losses would
    be lost, because clipping scales gradients to one norm.
    """

    count: int
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        weights = self.weights
        if weights is not None and not (len(weights) == self.count and all(0 < w < math.inf for w in weights)):
            raise ConfigurationError(f"class weights: give {self.count} finite numbers above 0, one for each class.")

    @property
    def outputs(self) -> int:
        """One logit a class."""
        return self.count

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return cross-entropies [B]."""
        if self.weights is not None:
            outputs_BO = outputs_BO - outputs_BO.new_tensor(self.weights).log()
        return F.cross_entropy(outputs_BO, y_B, reduction="none")


@dataclass(frozen=True)
class Numbers:
    """A number within public or private bounds, to which targets are clipped; the network learns it in [-1, 1]."""

    low: float
    high: float

    @property
    def outputs(self) -> int:
        """One."""
        return 1

    def scaled(self, y_B: Tensor) -> Tensor:
        """Return targets in [-1, 1], float32."""
        return (2 * (y_B.double() - self.low) / (self.high - self.low) - 1).clamp(-1, 1).float()

    def values(self, outputs_BO: Tensor) -> Tensor:
        """Return outputs as targets within the bounds, float64."""
        return self.low + (outputs_BO.squeeze(-1).double().clamp(-1, 1) + 1) / 2 * (self.high - self.low)

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return squared errors [B] of scaled targets."""
        return (outputs_BO.squeeze(-1) - y_B).square()
