"""Calls on DTensors, under torch's tensor and sequence parallelism.

A record is made of this rank's parts of input a and output gradient g. It is a part, the whole, or a term of the
sample's gradient (see [Note: Norms of parts] in clipping/parts.py):

    g in columns, a whole, weight in rows               a part: column-wise linear maps, and tables by columns
    g whole, a in columns, weight in columns            a part: row-wise linear maps
    g whole, ids whole, table in rows                   a part: a vocabulary in rows; other ranks' ids do not count
    g whole, a whole, parameter whole                   the whole: biases of row-wise maps, replicated layers
    g and a in parts of the sequence, parameter whole   a term of a sum: normalisation under SequenceParallel

Others are refused. If the output is a partial sum over ranks, g is whole. Autograd does not guarantee the placement of
g, so g is redistributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.clipping.tape import Use
from dpshard.records import Record
from dpshard.rules.call import Build, Call, Source, records_of
from dpshard.rules.torch_functions import Function

_PART, _WHOLE, _TERM = "part", "whole", "term"

_ADVICE = (
    "of torch's styles, ColwiseParallel and RowwiseParallel of nn.Linear and nn.Embedding, SequenceParallel, and "
    "PrepareModuleInput and -Output before and behind them are supported. Give the module such a style, or leave it "
    "out of the plan"
)


class PlacedCall(Call, Protocol):
    """The part of InterceptedCall that this module uses."""

    tensors: list[Tensor]


def is_placed(x: Any) -> bool:
    """Return True for a DTensor, without the slow import."""
    return type(x) is not Tensor and hasattr(x, "device_mesh")


def local(x: Any) -> Tensor:
    """Return this rank's part."""
    return x.detach().to_local() if is_placed(x) else x


def placed_use(
    call: PlacedCall, output: Any, keep: tuple[Tensor, ...], sources: Sequence[Source], build: Build
) -> tuple[Use, tuple[Tensor, ...]]:
    """Return the use of a call with DTensors, and this rank's parts of the kept tensors."""
    found = {_kind(call, output, x) for x in call.tensors if call.source(x) is not None}
    if len(found - {_PART, _WHOLE}) > 0 and found != {_TERM}:
        raise call.refuse(f"its parameters are placed in unlike ways; {_ADVICE}", advise=False)
    gradient = [_of_gradient(output)]
    kept = _own_rows(call, keep)

    def build_of_parts(*tensors: Any) -> Sequence[tuple[Source, Record]]:
        *own, g = tensors
        return records_of(sources, build, (*own, g.redistribute(placements=gradient).to_local()))

    return Use(tuple(sources), build_of_parts, termwise=found == {_TERM}), kept


def _of_gradient(output: Any) -> Any:
    from torch.distributed.tensor import Replicate

    (placement,) = output.placements
    return Replicate() if placement.is_partial() else placement


def _kind(call: PlacedCall, output: Any, parameter: Any) -> str:
    kind_of = _RULES.get(call.func)
    x: Any = call.tensors[0]
    source, axis = call.source(parameter), call.axis(x)
    if kind_of is None:
        raise call.refuse(f"no rule gives its per-sample gradient from parts on several ranks; {_ADVICE}", advise=False)
    if source is None or source.roots != (source.label,):
        raise call.refuse(
            "a tensor derived from a parameter with parts on several ranks has no rule; use the parameter itself",
            advise=False,
        )
    if not is_placed(x) or not is_placed(parameter) or any(len(y.placements) != 1 for y in (x, parameter, output)):
        raise call.refuse(f"its tensors are placed on several meshes, or on none; {_ADVICE}", advise=False)
    (a,), (w,), g = x.placements, parameter.placements, _of_gradient(output)
    if axis is not None and a.is_shard(axis.dim):
        raise call.refuse("the ranks of one model hold different samples; give all of them the same", advise=False)
    kind = kind_of(a, g, w, x, output, parameter)
    if kind is None:
        raise call.refuse(
            f"it has an input placed as {a}, an output gradient as {g}, and a parameter as {w}; {_ADVICE}",
            advise=False,
        )
    return kind


def _over_positions(a: Any, g: Any, w: Any, trailing: int, output: Tensor) -> str | None:
    if not w.is_replicate():
        return None
    if a.is_replicate() and g.is_replicate():
        return _WHOLE
    in_positions = a == g and g.is_shard() and g.dim % output.dim() < output.dim() - trailing
    return _TERM if in_positions else None


def _linear(a: Any, g: Any, w: Any, x: Tensor, output: Tensor, parameter: Tensor) -> str | None:
    last_in, last_out, weighs = x.dim() - 1, output.dim() - 1, parameter.dim() == 2
    if w.is_shard(0) and a.is_replicate() and g.is_shard(last_out):
        return _PART
    if w.is_shard(1) and a.is_shard(last_in) and g.is_replicate():
        return _PART
    if not weighs and w.is_replicate() and g.is_replicate():
        return _WHOLE
    return _over_positions(a, g, w, 1, output)


def _embedding(a: Any, g: Any, w: Any, x: Tensor, output: Tensor, parameter: Tensor) -> str | None:
    if a.is_replicate() and w.is_shard(0) and g.is_replicate():
        return _PART
    if a.is_replicate() and w.is_shard(1) and g.is_shard(output.dim() - 1):
        return _PART
    return _over_positions(a, g, w, 1, output)


def _norm(a: Any, g: Any, w: Any, x: Tensor, output: Tensor, parameter: Tensor) -> str | None:
    return _over_positions(a, g, w, parameter.dim(), output)


_RULES: dict[Function, Callable[..., str | None]] = {
    torch._C._nn.linear: _linear,  # type: ignore[attr-defined]
    F.linear: _linear,
    F.embedding: _embedding,
    F.layer_norm: _norm,
    F.rms_norm: _norm,
    torch.layer_norm: _norm,
    torch.rms_norm: _norm,
}


def _own_rows(call: PlacedCall, keep: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Rows of the table on other ranks get id -1."""
    own = tuple(map(local, keep))
    if call.func is not F.embedding:
        return own
    table: Any = call.tensors[1]
    (placement,) = table.placements
    if not placement.is_shard(0):
        return own
    if (call.args[2] if len(call.args) > 2 else call.kwargs.get("padding_idx")) is not None:
        raise call.refuse("padding_idx has no rule for a table with rows on several ranks; leave it out", advise=False)
    (ids,) = own
    most, rows = -(-table.shape[0] // table.device_mesh.size()), table.to_local().shape[0]
    ids = ids - most * table.device_mesh.get_local_rank()
    return (torch.where((ids >= 0) & (ids < rows), ids, -1),)
