"""Per-sample gradients of normalisation on a CPU: see [Note: Native code]."""

from __future__ import annotations

import torch
from torch import Tensor

from dpshard.kernels.native.library import is_unobserved, library


def supports_normalization(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if compiled code supports inputs of this device and dtype."""
    return device.type == "cpu" and dtype == torch.float32 and library() is not None


def normalization_gradients(x: Tensor, gradient: Tensor, groups: int, eps: float, centered: bool) -> Tensor:
    """Return per-sample gradients [2, B, K] of weights and biases of y = w (x - mean) / sqrt(var + eps) + b.

    `x` and the `gradient` of y are float32. groups > 0: [B, K, N], normalised by groups of K / groups rows. groups = 0:
    [B, N, K], normalised by row. Unless `centered`, the mean counts as 0. Raises ValueError otherwise.
    """
    function = _gradients if is_unobserved(x, gradient) else _operator
    return function(x, gradient, groups, eps, centered)


def _gradients(x: Tensor, gradient: Tensor, groups: int, eps: float, centered: bool) -> Tensor:
    compiled, shape = library(), x.shape
    fits = x.dim() == 3 and shape == gradient.shape and (not groups or shape[1] % groups == 0)
    if compiled is None or not x.dtype == gradient.dtype == torch.float32 or not fits:
        raise ValueError(f"No gradients of a normalisation of {x.dtype} {[*shape]} in {groups} groups here.")
    (B, K, N) = shape if groups else (shape[0], shape[2], shape[1])
    if 0 in shape:
        return x.new_zeros(2, B, K)
    x, gradient = x.contiguous(), gradient.contiguous()
    made, scratch = x.new_empty(2, B, K), x.new_empty(0 if groups else 2 * B * K)
    addresses = x.data_ptr(), gradient.data_ptr(), made.data_ptr(), scratch.data_ptr()
    compiled.normalization_gradients(addresses, (B, groups, N, K), eps, centered)
    return made


_operator = torch.library.custom_op("dpshard::normalization_gradients", _gradients, mutates_args=())
_operator.register_fake(
    lambda x, gradient, groups, eps, centered: x.new_empty(2, x.shape[0], x.shape[1 if groups else 2])
)
