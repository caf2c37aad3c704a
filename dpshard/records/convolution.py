"""Records of convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels import native
from dpshard.kernels.underflow import hidden
from dpshard.records.cost import ProductSize
from dpshard.records.numerics import accum_dtype, gram, gram_bound, norms, wide, zero_rows
from dpshard.records.outer_product import OuterProduct, floored
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.precision import exact_convolutions


@dataclass(frozen=True, slots=True)
class Convolution:
    """Gradient of a kernel [P, C / groups, *kernel]: sum over positions of output gradient times input window."""

    input: Tensor
    """[B, k, C, *space], k images per sample"""
    gradient: Tensor
    """[B, k, P, *positions]"""
    shape: torch.Size
    """Of the kernel."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def size(self) -> ProductSize:
        """Sizes that costs depend on."""
        (B, k, P), G = self.gradient.shape[:3], self.groups
        T, R, C = k * self.gradient.shape[3:].numel(), P // G, self.shape[1:].numel()
        nbytes = B * G * T * (R + C) * self.input.itemsize  # of the windows
        pixels = k * math.prod(n + 2 * p for n, p in zip(self.input.shape[3:], self.padding, strict=True))
        kernel = self.shape[2:].numel()
        dtype, device = accum_dtype(self.gradient), self.input.device
        # To unfold windows side by side only moves elements, so native code gains nothing.
        alike = self.input.dtype == self.gradient.dtype
        by_native = alike and self.stride != self.shape[2:] and native.supports_convolution(device, dtype, R, T)
        return ProductSize(B, G, T, R, C, dtype, device, nbytes, pixels, kernel, by_native=by_native)

    def is_whole(self) -> bool:
        """Return True if every window has an output position; output padding adds windows without one."""
        sizes = zip(self.input.shape[3:], self.padding, self.dilation, self.shape[2:], self.stride, strict=True)
        positions = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes)
        return positions == tuple(self.gradient.shape[3:])

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]."""
        size = self.size
        if method is NormMethod.GHOST or (method is NormMethod.CHEAPEST and not size.instantiates(kept=False)):
            return self._ghost_norm_sq() if size.gram_by_pixels else self.outer().norm_sq(NormMethod.GHOST)
        if not size.by_native:
            return self._floored(self.instantiated()[1])
        return self._floored(native.gradient_norm_sq(self.shape, self._images(), *self._steps()))

    def _ghost_norm_sq(self) -> Tensor:
        rows_BGTR = wide(self._rows())
        product = self._gram_of_windows().mul_(gram(rows_BGTR))
        scale = product.diagonal(0, 2, 3).sqrt().sum((1, 2))
        return gram_bound(product.sum((1, 2, 3)) + hidden(product[0].numel(), product.dtype), scale)

    def _gram_of_windows(self) -> Tensor:
        """Inner products [B, G, T, T] of windows, from those of pixels."""
        (B, k), G = self.input.shape[:2], self.groups
        padded = F.pad(wide(self.input), [p for size in reversed(self.padding) for p in (size, size)])
        space, positions = padded.shape[3:], self.gradient.shape[3:]
        # [B, k, C, *space] -> [B, G, C / G, k * space]
        x = padded.unflatten(2, (G, -1)).movedim(1, 3).flatten(3)
        of_pixels = gram(x.mT).view(B, G, k, *space, k, *space)
        total = of_pixels.new_zeros(())
        for place in itertools.product(*(range(n) for n in self.shape[2:])):
            seen = tuple(
                slice(d * at, d * at + s * (n - 1) + 1, s)
                for at, n, s, d in zip(place, positions, self.stride, self.dilation, strict=True)
            )
            total = total + of_pixels[(slice(None), slice(None), slice(None), *seen, slice(None), *seen)]
        T = k * positions.numel()
        return total.reshape(B, G, T, T)

    def _rows(self) -> Tensor:
        """[B, G, T, R]."""
        return self.gradient.unflatten(2, (self.groups, -1)).movedim(1, 3).flatten(3).mT

    def instantiated(self) -> tuple[Tensor, Tensor]:
        """Return `per_sample` and squared norms [B]; the clipped sum must use these gradients."""
        gradient, norm_sq = self._made()
        return gradient, norms(gradient).square() if norm_sq is None else norm_sq

    def _floored(self, norm_sq: Tensor) -> Tensor:
        # An input element is in at most as many windows as the kernel has elements.
        return floored(norm_sq, self.gradient, self.input, self.shape[2:].numel() ** 0.5)

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return self._made()[0]

    def _made(self) -> tuple[Tensor, Tensor | None]:
        """Return per-sample gradients, and squared norms [B] if compiled code computed them, too."""
        if self.input.device.type != "cpu" or self.stride == self.shape[2:]:
            # On a GPU, groups would be many small kernels.
            return self.outer().per_sample(), None
        total = self.input.new_empty((len(self.input), *self.shape), dtype=accum_dtype(self.gradient))
        if self.size.by_native:
            return total, native.per_sample_gradients_(total, self._images(), *self._steps())
        # CPUs are slow at unfolding, so samples become groups of a convolution. Above the size of the cache, it takes
        # several times the memory of its inputs.
        samples = max(1, _AT_ONCE * len(total) // max(1, sum(x.nbytes for x in (total, self.input, self.gradient))))
        for part, *pair in zip(*(x.split(samples) for x in (total, self.input, self.gradient)), strict=True):
            input, gradient = (wide(x).transpose(0, 1).flatten(1, 2) for x in pair)
            part.copy_(self._summed(input, gradient, samples=len(part)).view(part.shape))
        return total, None

    def _images(self) -> tuple[Tensor, Tensor]:
        return wide(self.input), wide(self.gradient)

    def _steps(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.stride, self.padding, self.dilation

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        if self.size.is_long:
            # The ordinary gradient would round long sums unlike the measured ones.
            return PerSampleGrad(self.per_sample()).clipped_sum(sum_weight_B)
        gradient = wide(self.gradient)
        weighted = gradient * sum_weight_B.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
        return self._summed(wide(self.input).flatten(0, 1), weighted.flatten(0, 1))

    def _summed(self, input: Tensor, gradient: Tensor, samples: int = 1) -> Tensor:
        """Gradient [samples * P, ...], summed over images [N, samples * C, *space]."""
        kernel = gradient.new_zeros(()).expand(samples * self.shape[0], *self.shape[1:])  # only its shape counts
        with exact_convolutions(gradient.device):
            *_, total, _ = torch.ops.aten.convolution_backward(
                gradient,
                input,
                kernel,
                None,
                *self._steps(),
                False,
                [0] * len(self.stride),
                samples * self.groups,
                [False, True, False],
            )
        return total

    def real(self) -> Convolution | OuterProduct:
        """Return real pairs for complex numbers."""
        return self.outer().real() if self.input.is_complex() else self

    def outer(self) -> OuterProduct:
        """Return the gradient as an outer product, whose columns are the windows."""
        rank, G = len(self.stride), self.groups
        seen = windows(self.input.flatten(0, 1), self.shape[2:], self.stride, self.padding, self.dilation)
        for dim, positions in enumerate(self.gradient.shape[3:], start=2):
            seen = seen.narrow(dim, 0, positions)
        # [N, C, *positions, *kernel] -> [N, G, positions, C / G * kernel]
        cols = seen.unflatten(1, (G, -1)).flatten(3, 2 + rank).transpose(2, 3).flatten(3)
        cols = cols.unflatten(0, (-1, self.input.shape[1])).transpose(1, 2).flatten(2, 3)
        return OuterProduct(self._rows(), cols, self.shape)

    def without(self, nonfinite_B: Tensor) -> Convolution:
        """Zero the samples `nonfinite_B`."""
        return replace(self, input=zero_rows(self.input, nonfinite_B), gradient=zero_rows(self.gradient, nonfinite_B))


_AT_ONCE = 4 * 2**20
"""Bytes of the tensors in one call."""


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Windows [N, C, *positions, *kernel] of x [N, C, *space]; without padding, a view."""
    x = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
    return x
