"""The cheapest exact norm of a product of rows and columns: by Gram matrices, or of the gradient itself.

[Note: What a norm costs]
Per sample of T positions, R rows and C columns, beside the 2TRC FLOPs that the clipped sum takes:

    ghost             the Gram matrices of rows and columns, half of them by symmetry: about T^2 (R + C) FLOPs
    instantiate       the gradient, 2TRC FLOPs, and to write and read its RC numbers
    instantiate, keep the same less 2TRC: the clipped sum is then made of the gradients that are there

Numbers that are written and read cost as much as some FLOPs, for which the processor would have had time meanwhile;
windows of a convolution three times as much, as they are gathered. The choice is made from sizes alone and never by the
clock: a run that is resumed must round as the first one did.
Bu et al. 2022, arXiv:2205.10683, Sec. 4, choose by 2 T^2 <= R C, the one that takes less memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpshard.rules.records.numerics import RESOLUTION

_KEPT_UNTIL_THE_END, _KEPT_FOR_NOW = 2, 3
"""Per-sample gradients are kept if they take at most so many times the memory of the record: until other layers have
their norms, or for the sum that comes next."""

_CACHE = 16 * 2**20
"""Bytes that stay in the cache of a CPU between being written and being read."""


@dataclass(frozen=True, slots=True)
class ProductSize:
    """The sizes of a product of rows [B, G, T, R] and columns [B, G, T, C]."""

    B: int
    G: int
    T: int
    R: int
    C: int
    dtype: torch.dtype
    """That norms and sums are taken in."""
    device: torch.device
    nbytes: int
    """Of rows and columns."""
    unfolded: bool = False
    """Whether the columns are windows, which Gram matrices need and the gradient does not."""

    @property
    def gradient_bytes(self) -> int:
        """Of the per-sample gradients."""
        return self.B * self.G * self.R * self.C * self.dtype.itemsize

    def may_be_kept(self, *, closing: bool) -> bool:
        """Whether there is memory for the per-sample gradients; `closing`, if they are summed at once.

        At a micro-batch of 1 the per-sample gradients of all layers are as large as the model, that of one is its sum.
        """
        times = _KEPT_FOR_NOW if closing else _KEPT_UNTIL_THE_END
        return (closing and self.B == 1) or self.gradient_bytes <= times * self.nbytes

    def instantiates(self, *, kept: bool) -> bool:
        """Whether the gradient itself gives the norm at the lower cost; `kept`, if the clipped sum re-uses it.

        One sample's gradient is the batch's, which the sum needs anyway: its norm costs nothing. Gram matrices of
        very many positions do not resolve the norm; see gram_floor.
        """
        if RESOLUTION * torch.finfo(self.dtype).eps * self.T > 0.5:
            return True
        if kept and self.B == 1:
            return True
        if self.T == 1:
            return False
        number = self._flops_a_byte() * self.dtype.itemsize  # to write and read one
        instantiated = number * self.R * self.C + (0 if kept else 2 * self.T * self.R * self.C)
        ghost = ghost_flops(self.T, self.R, self.C, self.device) + (
            3 * number * self.T * self.C if self.unfolded else 0
        )
        return instantiated < ghost

    def _flops_a_byte(self) -> int:
        """FLOPs that a processor does in the time of three passes over a byte."""
        if self.device.type != "cpu":
            return 60
        return 10 if self.gradient_bytes <= _CACHE else 45  # measured on server CPUs, float32


def blocks(T: int, device: torch.device) -> int:
    """Into how many blocks of positions Gram matrices are cut: products of small blocks are slow, above all on GPUs."""
    return min(8, max(1, T // (32 if device.type == "cpu" else 64)))


def ghost_flops(T: int, R: int, C: int, device: torch.device) -> int:
    """FLOPs of the ghost norm of one sample: a block meets itself and those before it, the others by symmetry."""
    n = blocks(T, device)
    return T * T * (R + C) * (n + 1) // n
