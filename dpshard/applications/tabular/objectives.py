"""The target of a table.

[Note: Weights and clipping]
Automatic clipping gives every gradient one norm. So a rare class loses, with or without weights: at epsilon 3 networks
found 1% of 8.7% rare rows of 2,000. Abadi's clipping, with weights, found 75 to 97%. So weighted classes take it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from dpshard.errors import ConfigurationError


class Objective(Protocol):
    """Losses of outputs."""

    @property
    def outputs(self) -> int:
        """Outputs of the network."""
        ...

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return losses [B], each of one row."""
        ...


@dataclass(frozen=True)
class Classes:
    """Classes 0 .. count - 1, with public weights.

    They shift logits in training by -log(weight): Menon et al. 2021, arXiv:2007.07314. Clipping would undo weighted
    losses.
    """

    count: int
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        weights = self.weights
        if weights is not None and not (len(weights) == self.count and all(0 < w < math.inf for w in weights)):
            raise ConfigurationError(f"class weights: give {self.count} finite numbers above 0, one for each class.")

    @property
    def outputs(self) -> int:
        """Logits."""
        return self.count

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return cross-entropies [B]."""
        if self.weights is not None:
            outputs_BO = outputs_BO - outputs_BO.new_tensor(self.weights).log()
        return F.cross_entropy(outputs_BO, y_B, reduction="none")


@dataclass(frozen=True)
class Numbers:
    """A number within bounds, to which targets are clipped."""

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
        """Return outputs within the bounds, float64."""
        return self.low + (outputs_BO.squeeze(-1).double().clamp(-1, 1) + 1) / 2 * (self.high - self.low)

    def losses(self, outputs_BO: Tensor, y_B: Tensor) -> Tensor:
        """Return squared errors [B]."""
        return (outputs_BO.squeeze(-1) - y_B).square()
