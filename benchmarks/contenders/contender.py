"""The interface of a contender, and its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.workloads import POOL, Workload, loss
from dpshard.applications.benchmark import Batch, Subject
from dpshard.applications.benchmark.training import LEARNING_RATE, expected_batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training to time."""

    workload: Workload
    threshold: float
    """max_grad_norm R; factors are min(1, R / norm)."""
    noise_multiplier: float = 1.0
    lr: float = LEARNING_RATE
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def expected_batch(self) -> int:
        """Divisor of the noisy sum."""
        return expected_batch(self.workload.batch)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Return the data set: inputs and targets."""
        x, y = self.workload.data(POOL * self.workload.batch)
        return x.to(device=self.device, dtype=self.dtype if x.is_floating_point() else None), y.to(self.device)

    def subject(self) -> Subject:
        """Return a new model, with the data set."""
        return Subject(self.model().train(), *self.data, loss)

    def model(self) -> nn.Module:
        """Return a new model, with random weights that its device has drawn: a CPU takes long for large ones."""
        with torch.device(self.device):
            return self.workload.build().to(self.dtype)


class Contender(ABC):
    """A way to take the whole private step: a Poisson-sized masked batch, clipping, noise, SGD, zero_grad."""

    groups: Sequence[Sequence[str]] | None = None
    """Names of the parameters of each clipping group; None: one group of all."""
    is_private = True
    in_torch = True
    """True if torch runs it, so that its operations can be counted."""

    @abstractmethod
    def step(self) -> Batch:
        """Take one step; the device may still be working on it."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters, under the names of the workload's model."""


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters of a torch model."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
