"""Normalisation layers with weight and bias: layer, group, instance and RMS norm, and batch norm in eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.kernels import native
from dpshard.records import PerSampleGrad, Record, wide
from dpshard.rules.call import Call, Source, batch_axis
from dpshard.rules.registry import rule

Normalize = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""From input, weight and bias to the output; without weight and bias, to the normalised input."""


@dataclass(frozen=True, slots=True)
class _Moments:
    eps: float
    groups: int = 0
    """Groups of channels, each normalised as a whole; 0: normalise the trailing dimensions."""
    centered: bool = True
    """True if it subtracts the mean."""


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_cudnn: bool,
) -> Tensor:
    """Weight and bias have the shape of the trailing dimensions."""
    shape = list(normalized_shape)
    moments = _Moments(eps)
    return _affine(call, input, weight, bias, lambda x, w, b: F.layer_norm(x, shape, w, b, eps), moments, trailing=True)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    call: Call, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Weight has the shape of the trailing dimensions."""
    shape = list(normalized_shape)
    moments = _Moments(torch.finfo(torch.float32).eps if eps is None else eps, centered=False)
    return _affine(call, input, weight, None, lambda x, w, _: F.rms_norm(x, shape, w, eps), moments, trailing=True)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_cudnn: bool,
) -> Tensor:
    """Weight and bias per channel (dimension 1)."""
    moments = _Moments(eps, num_groups)
    return _affine(
        call, input, weight, bias, lambda x, w, b: F.group_norm(x, num_groups, w, b, eps), moments, trailing=False
    )


@rule(F.instance_norm)
def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Weight and bias per channel; refuse running statistics: they would publish data without noise."""
    if use_input_stats and running_mean is not None:
        raise call.refuse(
            "its running statistics are updated from the data without noise; use track_running_stats=False",
            advise=False,
        )
    return _affine(
        call,
        input,
        weight,
        bias,
        lambda x, w, b: F.instance_norm(x, running_mean, running_var, w, b, use_input_stats, momentum, eps),
        _Moments(eps, input.shape[1]) if use_input_stats else None,
        trailing=False,
    )


@rule(F.batch_norm)
def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """In eval mode a fixed affine map per channel; refuse training mode, which mixes samples."""
    if training:
        raise call.refuse(
            "BatchNorm mixes the samples of a batch, so no per-sample gradient exists. Replace it by GroupNorm "
            "(dpshard.replace_unsupported(model) does), or put it in eval mode to use its frozen statistics",
            advise=False,
        )
    return _affine(
        call,
        input,
        weight,
        bias,
        lambda x, w, b: F.batch_norm(x, running_mean, running_var, w, b, False, momentum, eps),
        None,
        trailing=False,
    )


def _affine(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Normalize,
    moments: _Moments | None,
    *,
    trailing: bool,
) -> Tensor:
    """Y = normalize(x) * w + b: sum over positions g * normalize(x) for the gradient of w, and g for that of b.

    `trailing`: w has the shape of the last dimensions, else of dimension 1. Backward computes the normalised input
    again, to save memory. `moments`: None if they are not the input's own.
    """
    output = normalize(input, call.plain(weight), call.plain(bias))
    w, b = call.source(weight), call.source(bias)
    axis, B, rank = batch_axis(call, input), call.batch_size, input.dim() - 1
    if axis.dim != 0 and not trailing:
        raise call.refuse("the samples of the micro-batch must lie along dimension 0 of its input")

    def reduce(x: Tensor, shape: tuple[int, ...]) -> PerSampleGrad:
        rows = axis.split(wide(x), B)
        if trailing:
            return PerSampleGrad(rows.reshape(B, -1, *shape).sum(1))
        return PerSampleGrad(rows.movedim(rows.dim() - rank, 1).reshape(B, *shape, -1).sum(2))

    def natively(
        x: Tensor, g: Tensor, shape: tuple[int, ...], moments: _Moments
    ) -> tuple[PerSampleGrad, PerSampleGrad]:
        sizes = (B, -1, math.prod(shape)) if trailing else (len(x), *shape, x.shape[2:].numel())
        x, g = (axis.split(y, B).reshape(sizes) for y in (x, g))
        made = native.normalization_gradients(x, g, moments.groups, moments.eps, moments.centered)
        if not trailing:
            made = made.view(2, B, -1, *shape).sum(2)  # over the images of a sample
        of_weight, of_bias = made.view(2, B, *shape).unbind()
        return PerSampleGrad(of_weight), PerSampleGrad(of_bias)

    def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
        g = wide(tensors[-1])
        if w is not None and moments is not None and native.supports_normalization(g.device, g.dtype):
            pair = natively(wide(tensors[0]), g, w.shape, moments)
            return [(source, record) for source, record in zip((w, b), pair, strict=True) if source is not None]
        records: list[tuple[Source, Record]] = []
        if w is not None:
            # In place: on CPUs, page faults of a fresh tensor would cost more than the product.
            records.append((w, reduce(normalize(wide(tensors[0]), None, None).mul_(g), w.shape)))
        if b is not None:
            records.append((b, reduce(g, b.shape)))
        return records

    return call.tap(output, (input,) if w is not None else (), [s for s in (w, b) if s is not None], build)
