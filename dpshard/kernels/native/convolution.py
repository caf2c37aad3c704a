"""Per-sample gradients of convolutions on a CPU: see [Note: Native code]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpshard.kernels.native.library import library, supports_products

_MIN_CHANNELS = 8
"""Least output channels per group; fewer leave most of a tile empty."""

_MAX_POSITIONS = 2**16
"""Most positions of a sample, because the output gradients at all of them are packed at once."""


def supports_convolution(device: torch.device, dtype: torch.dtype, channels: int, positions: int) -> bool:
    """Return True if compiled code supports `channels` output channels per group."""
    return channels >= _MIN_CHANNELS and positions <= _MAX_POSITIONS and supports_products(device, dtype)


# These are operators of torch, so that fake tensors work and FLOPs are counted.


@torch.library.custom_op("dpshard::convolution_gradients_", mutates_args={"gradients"})
def per_sample_gradients_(
    gradients: Tensor, images: Sequence[Tensor], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Fill `gradients` [B, P, C, *kernel], contiguous, and return their squared norms [B].

    `images`: the input [B, k, G * C, *space] and the output gradient [B, k, P, *positions], float32, in at most three
    dimensions. G groups have P / G channels each. Raises ValueError otherwise.
    """
    return _call(gradients, gradients.shape[1:], images, stride, padding, dilation)


@torch.library.custom_op("dpshard::convolution_norms", mutates_args=())
def gradient_norm_sq(
    shape: Sequence[int],
    images: Sequence[Tensor],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the squared norms [B] of the gradients, without writing the gradients."""
    return _call(None, shape, images, stride, padding, dilation)


def _call(
    gradients: Tensor | None,
    shape: Sequence[int],
    images: Sequence[Tensor],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    compiled, (input, gradient) = library(), images
    given = [input, gradient] if gradients is None else [input, gradient, gradients]
    if compiled is None or any(x.dtype != torch.float32 for x in given):
        raise ValueError(f"Compiled code has no gradient of convolutions of {input.dtype} and {gradient.dtype}.")
    if min(x.numel() for x in given) == 0:
        if gradients is not None:
            gradients.zero_()
        return input.new_zeros(len(input))
    input, gradient, norm_sq = input.contiguous(), gradient.contiguous(), input.new_empty(len(input))
    (B, k, channels), (P, C, *kernel) = input.shape[:3], shape
    G, missing = channels // C, 3 - len(kernel)
    ends = [s * (n - 1) + d * (m - 1) for n, m, s, d in zip(gradient.shape[3:], kernel, stride, dilation, strict=True)]
    fits = all(end < n + 2 * p for end, n, p in zip(ends, input.shape[3:], padding, strict=True))
    if not fits or gradient.shape[:3] != (B, k, P) or channels != G * C or P % G:
        raise ValueError(f"A kernel {[*shape]} has no gradient of {[*input.shape]} and {[*gradient.shape]}.")
    if gradients is not None and not (gradients.is_contiguous() and len(gradients) == B):
        raise ValueError(f"The gradients {[*gradients.shape]} of {B} samples must be contiguous.")
    spatial = (gradient.shape[3:], kernel, stride, dilation, input.shape[3:])
    sizes = [B, k, G, P // G, C, *(n for three in spatial for n in ([1] * missing + list(three)))]
    sizes += [0] * missing + [*padding]
    compiled.convolution_gradients(
        input.data_ptr(),
        gradient.data_ptr(),
        None if gradients is None else gradients.data_ptr(),
        norm_sq.data_ptr(),
        sizes,
    )
    return norm_sq


per_sample_gradients_.register_fake(lambda gradients, images, *_: images[0].new_empty(len(gradients)))
gradient_norm_sq.register_fake(lambda shape, images, *_: images[0].new_empty(len(images[0])))
