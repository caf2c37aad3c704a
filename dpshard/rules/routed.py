"""Routed rows, as experts get them: those of all samples side by side; `Call.samples` says whose they are.

A mixture of experts keeps its weights in one tensor [G, ...]. The gradient of a sample is made of its own rows, each in
the group that it was sent to; an expert that no row came to has a gradient of zero, and noise like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.records import PerSample, Record, RoutedProduct, wide_dtype
from dpshard.rules.call import Call, Source
from dpshard.rules.elementwise import ELEMENTWISE
from dpshard.rules.registry import routed_rule
from dpshard.rules.torch_functions import functions_named

GROUPED = functions_named(["grouped_mm", "_grouped_mm"], (F, torch))
"""Products of rows [N, K], sorted by group, with a weight a group [G, K, P]; `offs` [G] says where groups end."""

_linear = torch._C._nn.linear  # type: ignore[attr-defined]  # see rules.linear


@routed_rule(_linear)
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Y = x W^T + b with W [P, D], of one expert or of all, and x [N, D]."""
    _refuse_unless_rows(call, input)
    input = call.hold(input)
    output = _linear(input, call.plain(weight), call.plain(bias))
    return _record(call, input, output, call.source(weight), call.source(bias), transposed=False)


@routed_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(call: Call, input: Tensor, other: Tensor) -> Tensor:
    """Y = x W with W [D, P], of one expert or of all, and x [N, D]."""
    _refuse_unless_rows(call, input)
    input = call.hold(input)
    output = call.func(input, call.plain(other))
    return _record(call, input, output, call.source(other), None, transposed=True)


@routed_rule(*GROUPED)
def grouped_mm(
    call: Call, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Y_n = x_n W_g with W [G, K, P] and x [N, K], sorted by group; `offs` [G] says where groups end."""
    _refuse_unless_rows(call, mat_a)
    source = call.source(mat_b)
    if source is None or offs is None or bias is not None or mat_b.dim() != 3:
        raise call.refuse("only x [N, K], a parameter [G, K, P] and offs are supported")
    mat_a = call.hold(mat_a)
    output = call.func(mat_a, call.plain(mat_b), offs=offs, out_dtype=out_dtype)
    group_N = torch.searchsorted(offs.long(), torch.arange(len(mat_a), device=offs.device), right=True)
    return _tap(call, mat_a, output, source, group_N, None, transposed=True)


@routed_rule(*ELEMENTWISE)
def elementwise(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Any elementwise function of routed rows [N, ...], parameters and constants; each row takes its sample's copy."""
    sample_N = call.samples
    assert sample_N is not None
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    rank = max(x.dim() for x in tensors)
    for x in tensors:
        rows = call.source(x) is None and call.axis(x) is not None
        if x.dim() == rank and len(x) != 1 and (not rows or len(x) != len(sample_N)):
            raise call.refuse("an argument has a dimension where the others have routed rows", advise=False)

    def enter(x: Tensor) -> Tensor:
        source = call.source(x)
        if source is None:
            return x
        shape = source.shape[1:] if len(source.shape) == rank else source.shape
        copies = call.per_sample(x).reshape(call.batch_size, *(1,) * (rank - 1 - len(shape)), *shape)
        return copies[sample_N]

    args, kwargs = pytree.tree_map_only(Tensor, enter, (args, kwargs))
    return call.func(*args, **kwargs)


def _refuse_unless_rows(call: Call, x: Tensor) -> None:
    axis = None if call.source(x) is not None else call.axis(x)
    if axis is None or not axis.routed or x.dim() != 2:
        raise call.refuse("its first argument is not [N, D] with the rows that were routed", advise=False)


def _record(
    call: Call, input: Tensor, output: Tensor, weight: Source | None, bias: Source | None, *, transposed: bool
) -> Tensor:
    """Tap `output` = `input` W^T + b, or `input` W + b if `transposed`."""
    if output.dim() != 2 or (weight is not None and len(weight.shape) != 2):
        raise call.refuse("only a matrix maps rows [N, D]")
    group = 0
    if weight is not None and weight.transpose_of is not None:
        weight, transposed = weight.transpose_of, not transposed
    if weight is not None and weight.slice_of is not None:
        # Recorded at the weight of all experts: what other experts leave there joins it.
        weight, group = weight.slice_of
    group_N = torch.full((len(input),), group, device=input.device)
    return _tap(call, input, output, weight, group_N, bias, transposed=transposed)


def _tap(
    call: Call,
    input: Tensor,
    output: Tensor,
    weight: Source | None,
    group_N: Tensor,
    bias: Source | None,
    *,
    transposed: bool,
) -> Tensor:
    B, sample_N = call.batch_size, call.samples
    assert sample_N is not None
    keep = (input.to(output.dtype),) if weight is not None else ()

    def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
        g_NP = tensors[-1]
        records: list[tuple[Source, Record]] = []
        if weight is not None:
            a_ND = tensors[0].conj()
            rows, cols = (a_ND, g_NP) if transposed else (g_NP, a_ND)
            records.append((weight, RoutedProduct(rows, cols, sample_N, group_N, B, torch.Size(weight.shape))))
        if bias is not None:
            gradient = g_NP.new_zeros(B, g_NP.shape[1], dtype=wide_dtype(g_NP))
            records.append((bias, PerSample(gradient.index_add_(0, sample_N, g_NP.to(gradient.dtype)))))
        return records

    return call.tap(output, keep, [s for s in (weight, bias) if s is not None], build)
