"""What the Adams of this package share: the check of their settings, and how a closure is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dpshard.config import is_number
from dpshard.errors import ConfigurationError


def check_adam(betas: tuple[float, float], weight_decay: float) -> None:
    """Raise ConfigurationError for settings that no Adam has."""
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ConfigurationError(f"betas={betas!r}: give two numbers, both at least 0 and below 1.")
    if not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ConfigurationError(f"weight_decay={weight_decay!r}: it is a finite number of at least 0.")


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss that `closure` returns, with gradients, within a step without them; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
