"""The exponential average of weights: steadier than the last weights, which the noise of the last steps moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.config import is_number
from dpshard.errors import CheckpointError, ConfigurationError


class WeightAverage:
    """The exponential average of a model's trainable parameters, to score and to publish.

    It is computed of released weights, so it costs no epsilon. The decay of update t is min(decay, (1 + t) / (10 + t)):
    the first weights do not weigh on a short run (De et al. 2022, arXiv:2204.13650, Sec. 3.2).

    Args:
        model: The model; under FSDP2, after `fully_shard`: each rank averages its own shards.
        decay: In [0, 1).

    Raises:
        ConfigurationError: for another decay.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigurationError(f"decay={decay!r}: it must be at least 0 and below 1.")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._decay, self._updates = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average: call it after every step of the optimizer."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        for name, p in self._parameters.items():
            self._average[name].lerp_(p, 1 - decay)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within the block, and its own ones back."""
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
        """Go to a `state_dict()`. Raises CheckpointError for the parameters of another model."""
        average = state["average"]
        if {name: x.shape for name, x in average.items()} != {name: x.shape for name, x in self._average.items()}:
            raise CheckpointError("The averaged weights are those of another model: load them where they were saved.")
        with torch.no_grad():
            for name, x in self._average.items():
                x.copy_(average[name])
        self._updates = state["updates"]
