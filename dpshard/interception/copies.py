"""Whether the gradients of padding rows are like those of the sample of which they are copies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpshard.clipping.functions import ClippingFunction, ClippingGroup

TOLERANCE = 0.25
"""Relative difference of the norms of equal rows; rounding in half precision stays far below."""
SMALL = 0.05
"""Share of the threshold below which a contribution may be rounding."""
NOTHING = 1e-6
"""Share of the sample's norm below which that of a copy is none: dropout does not shrink it so far, a mask does."""


@dataclass(frozen=True, slots=True)
class Norms:
    """What the norms of all groups tell."""

    samples: int
    """Rows that are samples; copies of the last one are behind them."""
    random: bool
    """Whether random numbers were drawn between forward and backward: copies may have had other dropout."""
    total_B: Tensor
    """Sum of the norms."""
    share_B: Tensor
    """The largest share of its threshold that a row contributes to a group."""
    unlike: Tensor
    """Bool, a copy each: whether a norm is not that of the sample."""

    def __add__(self, other: Norms) -> Norms:
        return Norms(
            self.samples,
            self.random,
            self.total_B + other.total_B,
            torch.maximum(self.share_B, other.share_B),
            self.unlike | other.unlike,
        )

    def are_masked(self) -> Tensor:
        """Whether copies alone have no gradient; bool []."""
        n, none_B = self.samples, self._none_B
        reached = ~none_B[:n].any()  # where samples have none, copies may have none, by their dropout
        return reached & none_B[n:].all() & (self.share_B[n - 1] > SMALL)

    def are_unlike(self, *, zero_allowed: bool) -> Tensor:
        """Whether a copy has another norm than the sample; bool []."""
        if self.random:
            return torch.zeros_like(self.unlike[0])
        return (self.unlike & ~self._none_B[self.samples :]).any() if zero_allowed else self.unlike.any()

    @property
    def _none_B(self) -> Tensor:
        return self.total_B <= NOTHING * self.total_B[self.samples - 1]


class Copies:
    """Compares the norms of a padded micro-batch, whose first `samples` rows are samples."""

    def __init__(self, samples: int) -> None:
        self.norms: Norms | None = None
        """None until a backward pass has come to its end."""
        self._samples = samples
        self._device = torch.device("cpu")
        self._states: list[Any] = []

    def begin(self, device: torch.device) -> None:
        """The first forward begins, on `device`."""
        if not self._states:
            self._states, self._device = _random_states(device), device

    def random(self) -> bool:
        """Whether random numbers were drawn since the first forward began."""
        return not _equal(self._states, _random_states(self._device))

    def observe(self, group: ClippingGroup, norm_B: Tensor, function: ClippingFunction) -> None:
        """Take the norms of a group."""
        n, norm_B = self._samples, norm_B.detach()
        share_B = function.factor(norm_B, group.threshold) * norm_B / group.threshold
        own, copies = norm_B[n - 1], norm_B[n:]
        apart = (copies - own).abs() > TOLERANCE * torch.maximum(copies, own)
        unlike = apart & (torch.maximum(share_B[n - 1], share_B[n:]) > SMALL)
        if self.norms is None:
            self.norms = Norms(n, self.random(), norm_B, share_B, unlike)
        else:
            self.norms = self.norms + Norms(n, self.norms.random, norm_B, share_B, unlike)


def _random_states(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002  # models draw from it
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b))
