"""The canary of the two-distribution audit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.clipping.functions import ClippingFunction
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

SampleLoss = Callable[[Any, Tensor], Tensor]
"""Returns losses [B] of output and targets."""

FAR_ABOVE, JUST_BELOW = 1e3, 0.99
"""Norms over a threshold, at least 1: automatic clipping adds 0.01 to norms."""

NEARLY = 0.99


@dataclass(frozen=True, slots=True)
class CanaryDirection:
    """The scaling of a canary."""

    pull: float
    lengths_M: Tensor
    """Clipped norm of each group [M], float64."""

    @property
    def length(self) -> float:
        """Clipped norm."""
        return float(self.lengths_M.norm())


class CanaryGradient:
    """The canary's `gradient` by name, clipped by `function` in M `groups` of names.

    Raises ConfigurationError without one.
    """

    def __init__(
        self, gradient: dict[str, Tensor], groups: Sequence[Sequence[str]], function: ClippingFunction
    ) -> None:
        parts = [{name: gradient[name].double() for name in names} for names in groups]
        norms = [norm_of(part.values()) for part in parts]
        if not 0 < math.hypot(*norms) < math.inf:
            raise ConfigurationError(
                f"The gradient of the canary has norm {math.hypot(*norms)}: choose a sample that the model can learn."
            )
        self._norm_M = torch.tensor(norms, dtype=torch.float64)
        self._units = [
            {name: g / norm for name, g in part.items()} if norm > 0 else {}
            for part, norm in zip(parts, norms, strict=True)
        ]
        self._function = function
        self._last: tuple[Sequence[float], CanaryDirection] | None = None

    def aim(self, thresholds: Sequence[float]) -> CanaryDirection:
        """Return a scaling that moves the release most at thresholds [M]."""
        if self._last is None or self._last[0] != thresholds:
            self._last = thresholds, self._aim(thresholds)
        return self._last[1]

    def _aim(self, thresholds: Sequence[float]) -> CanaryDirection:
        threshold_M = torch.tensor(thresholds, dtype=torch.float64)
        there_M = self._norm_M > 0
        just_M, far_M = ((bound_M / self._norm_M)[there_M] for bound_M in (threshold_M, threshold_M.clamp(min=1)))
        pull_S = torch.cat([just_M.new_ones(1), JUST_BELOW * just_M, FAR_ABOVE * far_M])
        norm_MS = self._norm_M[:, None] * pull_S
        factor_MS = torch.stack([self._function.factor(n, r) for n, r in zip(norm_MS, thresholds, strict=True)])
        length_MS = factor_MS * norm_MS
        length_S = length_MS.norm(dim=0)
        best = 0 if length_S[0] >= NEARLY * length_S.max() else int(length_S.argmax())
        return CanaryDirection(float(pull_S[best]), length_MS[:, best])

    def left_of(self, aim: CanaryDirection) -> dict[str, Tensor]:
        """Return the clipped gradient by name."""
        lengths = zip(aim.lengths_M.tolist(), self._units, strict=True)
        return {name: length * direction for length, unit in lengths for name, direction in unit.items()}

    def lengths(self, aim: CanaryDirection) -> list[float]:
        """Return the clipped norms of the groups."""
        lengths = zip(aim.lengths_M.tolist(), self._units, strict=True)
        return [length * float(part.norm()) for length, unit in lengths for part in unit.values() if part.any()]

    def along(self, full_gradient: Callable[[str], Tensor | None]) -> list[float]:
        """Return the full gradient along each nonzero part."""
        reached = []
        for unit in self._units:
            for name, part in unit.items():
                gradient = full_gradient(name)  # a collective, so for every parameter
                if part.any():
                    along = 0.0 if gradient is None else float((gradient.double() * part).sum() / part.norm())
                    reached.append(along)
        return reached


def sample_gradient(model: nn.Module, x: Tensor, y: Tensor, loss: SampleLoss) -> dict[str, Tensor]:
    """Return the gradient of one sample by name."""
    device = next(model.parameters()).device
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    value = loss(model(x.to(device)), y.to(device)).sum()
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def weighted_loss(losses_B: Tensor, weight_B: Tensor, reduction: str) -> Tensor:
    """Return the "mean" or "sum" of losses [B], or raise ConfigurationError."""
    if losses_B.shape != weight_B.shape:
        raise ConfigurationError(
            f"The loss of {len(weight_B)} samples has the shape {list(losses_B.shape)}. Return one loss per sample, "
            f"[B], as cross_entropy(..., reduction='none') does."
        )
    weighted_B = losses_B * weight_B.to(losses_B.device)
    return weighted_B.mean() if reduction == "mean" else weighted_B.sum()


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by canonical name."""
    return {canonical_name(name): p for name, p in model.named_parameters()}


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm."""
    return math.sqrt(sum(float(x.square().sum()) for x in tensors))
