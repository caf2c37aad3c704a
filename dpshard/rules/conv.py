"""Convolutions and transposed convolutions in 1, 2 and 3 dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.records import Convolution, OuterProduct, PerSampleGrad, Record, accum_dtype
from dpshard.rules.call import Call, Source, batch_axis
from dpshard.rules.registry import rule


def _tuple(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    values = tuple(value)
    return values * rank if len(values) == 1 else values


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
    """Weight [P, C / groups, *kernel]: the sum over output positions of gradient times input window."""
    output = call.func(input, call.plain(weight), call.plain(bias), stride, padding, dilation, groups)
    rank = weight.dim() - 2
    strides, dilations = _tuple(stride, rank), _tuple(dilation, rank)
    kernel = weight.shape[2:]
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads, uneven = tuple(t // 2 for t in totals), [t % 2 for t in totals]
    else:
        pads, uneven = (0,) * rank if padding == "valid" else _tuple(padding, rank), [0] * rank  # type: ignore[arg-type]
    extra = [p for size in reversed(uneven) for p in (0, size)]  # "same" pads an odd total more at the end

    def record(x: Tensor, g: Tensor, shape: torch.Size) -> Convolution:
        x = F.pad(x, extra) if any(extra) else x
        return Convolution(x, g, shape, strides, pads, dilations, groups)

    return _record(call, input, output, weight, bias, record)


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
    """Weight [C, P / groups, *kernel]: the adjoint of a convolution, so input and output gradient swap roles."""
    output = call.func(input, call.plain(weight), call.plain(bias), stride, padding, output_padding, groups, dilation)
    rank = weight.dim() - 2
    strides, pads, dilations = (_tuple(x, rank) for x in (stride, padding, dilation))

    def record(x: Tensor, g: Tensor, shape: torch.Size) -> Convolution | OuterProduct:
        convolution = Convolution(g, x, shape, strides, pads, dilations, groups)
        return convolution if convolution.is_whole() else convolution.outer()

    return _record(call, input, output, weight, bias, record)


def _record(
    call: Call,
    input: Tensor,
    output: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    record: Callable[[Tensor, Tensor, torch.Size], Record],
) -> Tensor:
    """Return the tapped output; `record` gets input and output gradient as [B, k, ...], k images per sample."""
    w, b = call.source(weight), call.source(bias)
    if input.dim() != weight.dim():
        raise call.refuse("its input has no batch dimension; pass [B, C, ...]")
    axis, B = batch_axis(call, input), call.batch_size
    if axis.dim != 0:
        raise call.refuse("its windows slide over the samples of the micro-batch")

    def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
        tensors = tuple(_images(axis.split(x, B), x.dim()) for x in tensors)
        records: list[tuple[Source, Record]] = []
        g = tensors[-1]
        if w is not None:
            records.append((w, record(tensors[0].conj(), g, torch.Size(w.shape))))
        if b is not None:
            total_BP = g.flatten(3).sum(3, dtype=accum_dtype(g)).sum(1)
            records.append((b, PerSampleGrad(total_BP)))
        return records

    return call.tap(output, (input,) if w is not None else (), [s for s in (w, b) if s is not None], build)


def _images(x: Tensor, dims: int) -> Tensor:
    return x if x.dim() > dims else x[:, None]
