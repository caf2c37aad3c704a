"""Normalisation layers with weight and bias; batch norm in eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.kernels import native
from dpshard.records import PerSampleGrad, Record, wide
from dpshard.rules.call import Call, Hold, Output, Planned, RecordMaker, batch_axis
from dpshard.rules.registry import rule


class Normalization(Protocol):
    """A normalisation. It has a method, because dynamo of torch 2.11 would hash an object that the code calls."""

    def output(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the output, with weight and bias or without."""
        ...


@dataclass(frozen=True, slots=True)
class _Moments:
    eps: float
    groups: int = 0
    """Number of groups of channels, each normalised as a whole; 0: normalise the trailing dimensions."""
    centered: bool = True


@dataclass(frozen=True, slots=True)
class _OfSizes:
    function: Callable[..., Tensor]
    sizes: tuple[int, ...] | int
    """Trailing dimensions, or number of groups."""
    eps: float | None

    def output(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        affine = (weight,) if self.function is F.rms_norm else (weight, bias)
        return self.function(x, self.sizes, *affine, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class _WithBuffers:
    function: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

    def output(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.function(x, weight, bias)


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
    """Return layer norm; weight and bias have the shape of the trailing dimensions."""
    normalize = _OfSizes(F.layer_norm, tuple(normalized_shape), eps)
    return _affine(call, input, weight, bias, normalize, _Moments(eps), trailing=True)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    call: Call, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return RMS norm; weight has the shape of the trailing dimensions."""
    moments = _Moments(torch.finfo(torch.float32).eps if eps is None else eps, centered=False)
    normalize = _OfSizes(F.rms_norm, tuple(normalized_shape), eps)
    return _affine(call, input, weight, None, normalize, moments, trailing=True)


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
    normalize, moments = _OfSizes(F.group_norm, num_groups, eps), _Moments(eps, num_groups)
    return _affine(call, input, weight, bias, normalize, moments, trailing=False)


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
    """Weight and bias per channel. Running statistics, which would publish data without noise, are refused."""
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
        _WithBuffers(
            lambda x, w, b: F.instance_norm(x, running_mean, running_var, w, b, use_input_stats, momentum, eps)
        ),
        _Moments(eps, input.shape[1]) if use_input_stats else None,
        trailing=False,
        repeated=False,
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
    """Return batch norm in eval mode, an affine map per channel. Training mode, which mixes samples, is refused."""
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
        _WithBuffers(lambda x, w, b: F.batch_norm(x, running_mean, running_var, w, b, False, momentum, eps)),
        None,
        trailing=False,
        repeated=False,
    )


def _affine(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalize: Normalization,
    moments: _Moments | None,
    *,
    trailing: bool,
    repeated: bool = True,
) -> Tensor:
    """Return normalize(x) * w + b.

    The gradient of w is the sum over positions of g * normalize(x), and that of b the sum of g. Backward normalises
    again, to save memory. `trailing`: w has the shape of the last dimensions, else of dimension 1. `moments`: None
    unless the mean and variance are those of the input. `repeated`: False if `normalize` holds buffers, which may be
    other tensors in another call.
    """
    w, b = call.source(weight), call.source(bias)
    axis = batch_axis(call, input)
    if axis.dim != 0 and not trailing:
        raise call.refuse("the samples of the micro-batch must lie along dimension 0 of its input")
    shapes = [None if source is None else source.shape for source in (w, b)]
    maker = _Sums(axis, call.batch_size, shapes[0], shapes[1], normalize, moments, input.dim() - 1, trailing)
    sources = tuple([s for s in (w, b) if s is not None])

    def run(_: Hold, input: Tensor, weight: Any, bias: Any) -> Output:
        return normalize.output(input, weight, bias), (input,) if w is not None else ()

    if repeated:
        return call.run(Planned(sources, maker, run), input, weight, bias)
    output, keep = run(call.hold, input, call.plain(weight), call.plain(bias))
    return call.tap(output, keep, sources, maker)


@dataclass(frozen=True, slots=True)
class _Sums(RecordMaker):
    weight: tuple[int, ...] | None
    """Shape of the weight if it is a source, else None."""
    bias: tuple[int, ...] | None
    normalize: Normalization
    moments: _Moments | None
    rank: int
    """Number of dimensions of a sample."""
    trailing: bool

    def __call__(self, *tensors: Tensor) -> Sequence[Record]:
        g, moments = wide(tensors[-1]), self.moments
        if not g.numel():
            shapes = [shape for shape in (self.weight, self.bias) if shape is not None]
            return [PerSampleGrad(g.new_zeros(self.batch_size, *shape)) for shape in shapes]
        if self.weight is not None and moments and native.supports_normalization(g.device, g.dtype):
            pair = self._natively(wide(tensors[0]), g, self.weight, moments)
            return pair if self.bias is not None else pair[:1]
        records: list[Record] = []
        if self.weight is not None:
            # In place: page faults of a fresh tensor cost more than the product.
            records.append(self._reduced(self.normalize.output(wide(tensors[0]), None, None).mul_(g), self.weight))
        if self.bias is not None:
            records.append(self._reduced(g, self.bias))
        return records

    def _reduced(self, x: Tensor, shape: tuple[int, ...]) -> PerSampleGrad:
        B = self.batch_size
        rows = self.axis.split(wide(x), B)
        if self.trailing:
            return PerSampleGrad(rows.reshape(B, -1, *shape).sum(1))
        return PerSampleGrad(rows.movedim(rows.dim() - self.rank, 1).reshape(B, *shape, -1).sum(2))

    def _natively(self, x: Tensor, g: Tensor, shape: tuple[int, ...], moments: _Moments) -> list[PerSampleGrad]:
        B, trailing = self.batch_size, self.trailing
        sizes = (B, -1, math.prod(shape)) if trailing else (len(x), *shape, x.shape[2:].numel())
        x, g = (self.axis.split(y, B).reshape(sizes) for y in (x, g))
        made = native.normalization_gradients(x, g, moments.groups, moments.eps, moments.centered)
        if not trailing:
            made = made.view(2, B, -1, *shape).sum(2)  # over the images of a sample
        return [PerSampleGrad(gradient) for gradient in made.view(2, B, *shape).unbind()]
