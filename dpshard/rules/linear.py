"""Linear maps of the last dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.records import OuterProduct, PerSampleGrad, Record, accum_dtype
from dpshard.rules.call import BatchAxis, Call, Hold, Output, Planned, RecordMaker, Source, batch_axis
from dpshard.rules.registry import rule
from dpshard.rules.vectorized import vectorized

# DeepSpeed's zero.Init replaces F.linear, perhaps before this import.
_linear = torch._C._nn.linear  # type: ignore[attr-defined]


@rule(_linear)
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b with W [P, D] and x [..., D].

    A vector W [D] or a broadcast bias gets a copy per sample.
    """
    broadcasts = bias is not None and call.source(bias) is not None and bias.shape != weight.shape[:1]
    if weight.dim() == 1 or broadcasts:
        return vectorized(call, *call.args, **call.kwargs)
    return _record(call, _unviewed, input, weight, bias, transposed=False)


def _unviewed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _linear(input, weight, bias)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and output._is_view():
        # With a tap on a view of addmm's output, autograd would copy the gradient of its base twice.
        return torch.ops.aten._unsafe_view.default(output, output.shape)
    return output


@rule(torch.addmm, Tensor.addmm)
def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return b + x W with W [D, P] and x [B * T, D], as in the Conv1D of GPT-2."""
    if beta != 1 or alpha != 1 or call.source(mat1) or input.shape != mat2.shape[1:] or not _is_matrix(call, mat2):
        return vectorized(call, *call.args, **call.kwargs)
    return _record(call, lambda x, w, b: torch.addmm(b, x, w), mat1, mat2, input, transposed=True)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(call: Call, input: Tensor, other: Tensor) -> Tensor:
    """Return x W with W [D, P]; run other products sample by sample."""
    if call.source(input) or not _is_matrix(call, other) or input.dim() < 2:
        return vectorized(call, input, other)
    return _record(call, lambda x, w, _: torch.matmul(x, w), input, other, None, transposed=True)


@rule(Tensor.__rmatmul__)
def rmatmul(call: Call, other: Tensor, input: Tensor) -> Tensor:
    """Return `input @ other`; Python calls this on the right operand."""
    return matmul(call, input, other)


@rule(F.bilinear)
def bilinear(call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_p = x1^T W_p x2 + b_p with W [P, D1, D2]: a linear map of the inputs' outer product."""
    output = F.bilinear(input1, input2, call.plain(weight), call.plain(bias))
    w, b, axis, B = call.source(weight), call.source(bias), batch_axis(call, input1), call.batch_size
    if batch_axis(call, input2) != axis:
        raise call.refuse("its two inputs carry the samples of the micro-batch in different dimensions")

    def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
        *inputs, g_BTP = (_rows(axis, x, B) for x in tensors)
        records: list[tuple[Source, Record]] = []
        if w is not None:
            left_BTD, right_BTE = inputs
            cols = (left_BTD[..., :, None] * right_BTE[..., None, :]).flatten(2)
            records.append((w, OuterProduct(g_BTP[:, None], cols[:, None], torch.Size(w.shape))))
        if b is not None:
            records.append((b, PerSampleGrad(g_BTP.sum(1, dtype=accum_dtype(g_BTP)))))
        return records

    return call.tap(output, (input1, input2) if w else (), [s for s in (w, b) if s is not None], build)


def _rows(axis: BatchAxis, x: Tensor, B: int) -> Tensor:
    of_samples = axis.split(x, B)
    return of_samples.flatten(1, -2) if of_samples.dim() > 2 else of_samples[:, None]


def _is_matrix(call: Call, x: Tensor) -> bool:
    source = call.source(x)
    return x.dim() == 2 and (source is not None or call.axis(x) is None)


def _record(
    call: Call, product: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> Tensor:
    axis, w, b = batch_axis(call, input), call.source(weight), call.source(bias)
    gradient = _through_transposed if transposed else _through
    if w is not None and w.transpose_of is not None:
        # The record of a head joins that of a tied embedding without a gradient [V, C] per sample.
        w, transposed = w.transpose_of, not transposed
    recorded, shape = w is not None, None if w is None else w.shape
    whole = recorded and (bias is None or b is not None)

    def run(hold: Hold, input: Tensor, weight: Any, bias: Any) -> Output:
        input = hold(input) if recorded else input
        output = product(input, weight, bias)
        # Under autocast, forward multiplied in the output's precision.
        return output, (input.to(output.dtype),) if recorded else ()

    maker = _Products(axis, call.batch_size, shape, has_bias=b is not None, transposed=transposed)
    planned = Planned(tuple([s for s in (w, b) if s is not None]), maker, run, gradient if whole else None)
    return call.run(planned, input, weight, bias)


def _through(g: Tensor, weight: Tensor) -> Tensor:
    return g.matmul(weight.conj())


def _through_transposed(g: Tensor, weight: Tensor) -> Tensor:
    return g.matmul(weight.mH)


@dataclass(frozen=True, slots=True)
class _Products(RecordMaker):
    shape: tuple[int, ...] | None
    """Shape of the weight if it is a source, else None."""
    has_bias: bool
    transposed: bool

    def __call__(self, *tensors: Tensor) -> Sequence[Record]:
        B = self.batch_size
        g_BTP = _rows(self.axis, tensors[-1], B)
        records: list[Record] = []
        if self.shape is not None:
            a_BTD = _rows(self.axis, tensors[0], B).conj()
            rows, cols = (a_BTD, g_BTP) if self.transposed else (g_BTP, a_BTD)
            records.append(OuterProduct(rows[:, None], cols[:, None], torch.Size(self.shape)))
        if self.has_bias:
            records.append(PerSampleGrad(g_BTP.sum(1, dtype=accum_dtype(g_BTP))))
        return records
