"""Convolutions and transposed convolutions in 1, 2 and 3 dimensions, grouped ones included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.rules.call import Call, Source, batch_axis
from dpshard.rules.records import OuterProduct, PerSample, Record, wide_dtype
from dpshard.rules.registry import rule


def _tuple(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    values = tuple(value)
    return values * rank if len(values) == 1 else values


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The windows that a kernel sees in x [N, C, *space], a view: [N, C, *positions, *kernel]."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
    return x


@rule(F.conv1d, F.conv2d, F.conv3d)
def conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Weight [P, C / groups, *kernel]: at every output position the product of its gradient and its input window."""
    output = call.func(input, call.plain(weight), call.plain(bias), stride, padding, dilation, groups)
    kernel, rank = tuple(weight.shape[2:]), weight.dim() - 2
    strides, dilations = _tuple(stride, rank), _tuple(dilation, rank)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(0, 0)] * rank if padding == "valid" else [(p, p) for p in _tuple(padding, rank)]  # type: ignore[arg-type]
    flat_pads = [p for pair in reversed(pads) for p in pair]

    def outer(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, windows(F.pad(x, flat_pads), kernel, strides, dilations)

    return _record(call, input, output, weight, bias, groups, outer)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Weight [C, P / groups, *kernel]: the adjoint of a convolution, so input and output gradient swap their parts."""
    output = call.func(input, call.plain(weight), call.plain(bias), stride, padding, output_padding, groups, dilation)
    kernel, rank = tuple(weight.shape[2:]), weight.dim() - 2
    strides, dilations = _tuple(stride, rank), _tuple(dilation, rank)
    flat_pads = [p for size in reversed(_tuple(padding, rank)) for p in (size, size)]

    def outer(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        seen = windows(F.pad(g, flat_pads), kernel, strides, dilations)
        # Output padding leaves room for positions past the last input.
        for dim, size in enumerate(x.shape[2:], start=2):
            seen = seen.narrow(dim, 0, size)
        return x, seen

    return _record(call, input, output, weight, bias, groups, outer)


def _record(
    call: Call, input: Tensor, output: Tensor, weight: Tensor, bias: Tensor | None, groups: int, outer
) -> Tensor:
    """Tap a convolution; `outer` gives, from input and output gradient, rows [N, R, *positions] and their windows."""
    w, b = call.source(weight), call.source(bias)
    if input.dim() != weight.dim():
        raise call.refuse("its input has no batch dimension; pass [B, C, ...]")
    axis, B, rank = batch_axis(call, input), call.batch_size, weight.dim() - 2
    if axis.dim != 0:
        raise call.refuse("it slides over the samples of the micro-batch")

    def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
        g = tensors[-1]
        records: list[tuple[Source, Record]] = []
        if w is not None:
            rows_NRx, seen = outer(tensors[0], g)
            N, G = len(rows_NRx), groups
            rows = rows_NRx.reshape(N, G, rows_NRx.shape[1] // G, -1).mT
            # [N, C, *positions, *kernel] -> [N, G, positions, C / G * kernel]
            seen = seen.unflatten(1, (G, seen.shape[1] // G)).flatten(3, 2 + rank).transpose(2, 3).flatten(3)
            rows, cols = (_samples_first(axis.split(x, B)) for x in (rows, seen))
            records.append((w, OuterProduct(rows, cols, torch.Size(w.shape))))
        if b is not None:
            total = g.flatten(2).sum(2, dtype=wide_dtype(g))
            records.append((b, PerSample(axis.split(total, B).reshape(B, -1, total.shape[1]).sum(1))))
        return records

    return call.tap(output, (input,) if w is not None else (), [s for s in (w, b) if s is not None], build)


def _samples_first(x: Tensor) -> Tensor:
    """[B, G, T, R] as it is; [B, k, G, T, R] (k images a sample) with the images among the positions."""
    return x if x.dim() == 4 else x.transpose(1, 2).flatten(2, 3)
