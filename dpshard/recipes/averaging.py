"""The exponential average of weights, steadier than the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.config import is_number
from dpshard.errors import CheckpointError, ConfigurationError


class WeightAverage:
    """The exponential average of a model's trainable parameters, to score and to publish, at no epsilon.

    The decay of update t is min(decay, (1 + t) / (10 + t)); see De et al. 2022, arXiv:2204.13650, Sec. 3.2. Averages of
    half-precision weights are float32.

    Args:
        model: The model; under FSDP2, after `fully_shard`: each rank averages its shards.
        decay: In [0, 1).

    Raises:
        ConfigurationError: for another decay, or parameters that ZeRO-3 has partitioned.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigurationError(f"decay={decay!r}: it must be at least 0 and below 1.")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if any(hasattr(p, "ds_id") and p.numel() == 0 for p in self._parameters.values()):
            raise ConfigurationError(
                "DeepSpeed's ZeRO-3 has partitioned the parameters, so no weights are here to average. Average the "
                "checkpoints, or shard by FSDP2."
            )
        self._average = {name: _at_least_float32(p).clone() for name, p in self._parameters.items()}
        self._decay, self._updates = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights; call it after every step of the optimizer."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        for name, p in self._parameters.items():
            self._average[name].lerp_(_at_least_float32(p), 1 - decay)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights within the block."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._set(self._average)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._parameters.items():
            p.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, and the number of updates."""
        return {"average": dict(self._average), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a `state_dict()`. Raises CheckpointError for another model's."""
        average = state.get("average", {})
        if {name: x.shape for name, x in average.items()} != {name: x.shape for name, x in self._average.items()}:
            raise CheckpointError(
                "The averaged weights belong to another model: load them into the model that saved them."
            )
        with torch.no_grad():
            for name, x in self._average.items():
                x.copy_(average[name])
        self._updates = state["updates"]


def _at_least_float32(p: Tensor) -> Tensor:
    """Fewer bits cannot hold a small change."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32))
