"""Common parts of this package's Adams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dpshard.config import is_number
from dpshard.errors import ConfigurationError


def require_adam_settings(betas: tuple[float, float], weight_decay: float) -> None:
    """Raise ConfigurationError unless 0 <= beta < 1 for both betas, and 0 <= weight_decay < inf."""
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ConfigurationError(f"betas={betas!r}: give two numbers, both at least 0 and below 1.")
    if not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ConfigurationError(f"weight_decay={weight_decay!r}: it must be a finite number of at least 0.")


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of `closure`, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
