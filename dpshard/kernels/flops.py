"""FLOPs of the kernels, for torch's FlopCounterMode; import this module to count them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import dpshard.kernels.triton.operators  # noqa: F401
from dpshard.kernels.native import ghost_flops
from dpshard.kernels.triton.tiles import ghost_tile, triangle

_ops = torch.ops.dpshard


@register_flop_formula(_ops.ghost_norms)
def _native_ghost_norms(rows: Any, cols: Any, *_: Any, **__: Any) -> int:
    B, G, T, R = rows
    return B * G * ghost_flops(T, R, cols[3])


@register_flop_formula(_ops.convolution_gradients_)
def _convolution_gradients(gradients: Any, images: Any, *_: Any, **__: Any) -> int:
    return _convolution_norms(gradients[1:], images)


@register_flop_formula(_ops.convolution_norms)
def _convolution_norms(shape: Any, images: Any, *_: Any, **__: Any) -> int:
    input, gradient = images
    return 2 * input[0] * math.prod(shape) * math.prod((gradient[1], *gradient[3:]))


@register_flop_formula(_ops.ghost_norm_sq)
def _triton_ghost_norms(rows: Any, cols: Any, *_: Any, **__: Any) -> int:
    (B, G, T, R), C = rows, cols[3]
    tile = ghost_tile(B * G, T)
    return 2 * B * G * triangle(T, tile) * tile * tile * (R + C)


@register_flop_formula([_ops.gradient_norm_sq, _ops.per_sample, _ops.weighted_sum])
def _triton_products(rows: Any, cols: Any, *_: Any, **__: Any) -> int:
    B, G, T, R = rows
    return 2 * B * G * T * R * cols[3]


@register_flop_formula(_ops.weighted_rows)
def _triton_rows(x: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x)
