"""Compares gradients of padding rows with that of the sample that they copy."""

from __future__ import annotations

import torch
from torch import Tensor

from dpshard.clipping.functions import ClippingFunction, factors
from dpshard.clipping.groups import ClippingGroup
from dpshard.interception.rows.doubts import Doubt, Doubts

TOLERANCE = 0.25
"""Largest relative difference between norms of equal rows; far above half precision's rounding."""
SMALL = 0.05
"""Share of the clipping threshold below which a norm may be rounding."""
NOTHING = 1e-6
"""Share of the sample's norm below which the loss has masked the copy. Dropout leaves larger norms."""


class Copies:
    """Compares norms in a padded micro-batch; its first `samples` rows are samples.

    If losses are sums (not `mean`), they may omit padding.
    """

    def __init__(self, samples: int, *, mean: bool) -> None:
        self._samples, self._mean = samples, mean
        self._norms: list[tuple[ClippingGroup, Tensor]] = []
        self._device = torch.device("cpu")
        self._states: list[Tensor] = []

    def begin(self, device: torch.device) -> None:
        """Store the states of the random generators."""
        if not self._states:
            self._states, self._device = _random_states(device), device

    def random(self) -> bool:
        """Return True if random numbers were drawn since `begin`, so that copies may differ by dropout."""
        now = _random_states(self._device)
        return not all(torch.equal(x, y) for x, y in zip(self._states, now, strict=True))

    def observe(self, group: ClippingGroup, norm_B: Tensor) -> None:
        """Add the norms of a clipping group."""
        self._norms.append((group, norm_B.detach()))

    def end(self, doubts: Doubts, function: ClippingFunction) -> None:
        """Compare the norms, and note the findings in `doubts`."""
        if not self._norms or not self._states:
            return
        n = self._samples
        norm_MB = torch.stack([norm_B for _, norm_B in self._norms])
        own_M1, copies_MC = norm_MB[:, n - 1 : n], norm_MB[:, n:]
        if norm_MB.device.type == "cpu" and torch.equal(copies_MC, own_M1.expand_as(copies_MC)):
            return
        apart_MC = (copies_MC - own_M1).abs() > TOLERANCE * torch.maximum(copies_MC, own_M1)
        if apart_MC.device.type == "cpu" and not apart_MC.any():
            return
        thresholds = [group.threshold for group, _ in self._norms]
        clipped_MB = factors(function, norm_MB, thresholds) * norm_MB
        share_MB = torch.stack(torch._foreach_div(clipped_MB.unbind(), thresholds))
        total_B = norm_MB.sum(0)
        none_B = total_B <= NOTHING * total_B[n - 1]
        # If other samples have no gradient either, the cause may be dropout.
        masked = none_B[n:].all() & ~none_B[:n].any() & (share_MB[:, n - 1].amax() > SMALL)
        if self._mean:
            doubts.note(Doubt.MASKED, masked, wait=True)
        if not self.random():
            unlike_C = (apart_MC & (torch.maximum(share_MB[:, n:], share_MB[:, n - 1 : n]) > SMALL)).any(0)
            doubts.note(Doubt.UNLIKE, (unlike_C if self._mean else unlike_C & ~none_B[n:]).any(), wait=True)


def _random_states(device: torch.device) -> list[Tensor]:
    # Reading numpy's and Python's states is slow.
    host = torch.get_rng_state()
    if device.type == "cpu":
        return [host]
    one = () if device.type == "mps" else (device,)  # Metal takes no device argument
    return [host, torch.get_device_module(device).get_rng_state(*one)]
