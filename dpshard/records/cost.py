"""The cheapest exact norm of a product of rows and columns.

[Note: What a norm costs]
Per sample of T positions, R rows and C columns, besides the 2TRC FLOPs of the clipped sum:

    ghost             half the Gram matrices of rows and columns: about T^2 (R + C) FLOPs
    instantiate       2TRC FLOPs, and writing and reading RC numbers, unless they stay in registers
    instantiate, keep the same less 2TRC: the clipped sum reuses the gradients

Gathering windows costs four times as much as a write and a read. For small images, the Gram matrix of pixels gives that
of windows.

The choice does not depend on measured times, so a resumed run rounds as before. Bu et al. 2022, arXiv:2205.10683, Sec.
4, choose by memory: ghost where 2 T^2 <= R C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpshard.kernels import native
from dpshard.kernels.triton import ghost_tile, supports_ghost_norm
from dpshard.records.numerics import relative_floor

_KEPT_UNTIL_THE_END, _KEPT_FOR_NOW = 2, 3
"""Largest ratios of kept gradients to their record, in bytes: if they wait for norms, or are summed at once."""

_CACHE, _CACHE_MEANWHILE = 16 * 2**20, 2**20
"""Bytes that a CPU's cache still holds at an immediate read, or after other layers."""

_TENSOR_CORES = 8
"""Speed of half-precision kernels over float32 products; not measured."""


@dataclass(frozen=True, slots=True)
class ProductSize:
    """Sizes of a product of rows [B, G, T, R] and columns [B, G, T, C]."""

    B: int
    G: int
    T: int
    R: int
    C: int
    dtype: torch.dtype
    """Dtype of norms and sums."""
    device: torch.device
    nbytes: int
    """Bytes of rows and columns."""
    pixels: int = 0
    """Elements of one channel of a convolution's padded input."""
    kernel: int = 1
    """Elements of one channel of a window."""
    by_triton: bool = False
    """True if Triton kernels multiply."""
    by_native: bool = False
    """True if native code computes convolution gradients."""

    @property
    def gradient_bytes(self) -> int:
        """Memory of the per-sample gradients."""
        return self.B * self.G * self.R * self.C * self.dtype.itemsize

    def may_be_kept(self, *, closing: bool) -> bool:
        """Return True if memory allows per-sample gradients to be kept. `closing`: they are summed at once.

        With B = 1 a gradient is as large as its clipped sum.
        """
        times = _KEPT_FOR_NOW if closing else _KEPT_UNTIL_THE_END
        return (closing and self.B == 1) or self.gradient_bytes <= times * self.nbytes

    @property
    def is_long(self) -> bool:
        """True if gram_bound adds more than half the squared norm of orthogonal gradients: T > 4,096 in float32."""
        return relative_floor(self.dtype) * self.T > 0.5

    def instantiates(self, *, kept: bool, closing: bool = False) -> bool:
        """Return True if the norm is cheaper from the gradient itself. `kept`: the clipped sum reuses the gradient.

        `closing`: it does so at once. With B = 1 the sum needs the gradient anyway.
        """
        if self.is_long:
            return True
        if kept and self.B == 1:
            return True
        if self.T == 1:
            return False
        if kept:
            return self._flops_a_number(waits=not closing) * self.R * self.C < min(self._ghost(), self._dropped())
        return self._dropped() < self._ghost()

    def _dropped(self) -> int:
        """FLOPs of a norm by gradients that are not kept; Triton and native code do not even write them."""
        product = 2 * self.T * self.R * self.C
        if self.by_triton:
            return product // _TENSOR_CORES
        return product if self.by_native else product + self._flops_a_number() * self.R * self.C

    def _ghost(self) -> int:
        if self.by_triton and supports_ghost_norm(self.B * self.G, self.T, self.R + self.C):
            tile = ghost_tile(self.B * self.G, self.T)
            n = -(-self.T // tile)
            return n * (n + 1) * tile * tile * (self.R + self.C) // _TENSOR_CORES
        if not self.pixels:
            return ghost_flops(self.T, self.R, self.C, self.device, self.dtype)
        return self._by_pixels() if self.gram_by_pixels else self._by_windows()

    @property
    def gram_by_pixels(self) -> bool:
        """True if the Gram matrix of pixels is the cheapest, without more memory."""
        return self.pixels**2 <= self.T * self.C and self._by_pixels() < self._by_windows()

    def _by_pixels(self) -> int:
        positions = self.T * self.T
        products = 2 * positions * self.R + 2 * self.pixels**2 * self.C // self.kernel
        return products + self._flops_a_number() * self.kernel * positions

    def _by_windows(self) -> int:
        unfolding = 4 * self._flops_a_number() * self.T * self.C
        return ghost_flops(self.T, self.R, self.C, self.device, self.dtype) + unfolding

    def _flops_a_number(self, *, waits: bool = False) -> int:
        """FLOPs in the time of one write and two reads of a number; `waits`: the second read comes late."""
        return self._flops_a_byte(waits) * self.dtype.itemsize

    def _flops_a_byte(self, waits: bool) -> int:
        if self.device.type != "cpu":
            return 60
        cached = self.gradient_bytes <= (_CACHE_MEANWHILE if waits else _CACHE)
        return 18 if cached else 45  # measured on server CPUs, float32


def blocks(T: int, device: torch.device) -> int:
    """Return the number of blocks of positions; small blocks are slow."""
    return min(8, max(1, T // (32 if device.type == "cpu" else 64)))


def ghost_flops(T: int, R: int, C: int, device: torch.device, dtype: torch.dtype) -> int:
    """FLOPs of the ghost norm of a sample."""
    if native.supports_ghost_norm(device, dtype):
        return native.ghost_flops(T, R, C)
    n = blocks(T, device)
    return T * T * (R + C) * (n + 1) // n
