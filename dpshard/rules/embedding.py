"""Tables read by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.records import EmbeddingRecord, Record
from dpshard.rules.call import BatchAxis, Call, Source, batch_axis
from dpshard.rules.registry import composite, rule
from dpshard.rules.torch_functions import functions_named


@rule(F.embedding)
def embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return rows of a table [V, C]; reads of `padding_idx` have no gradient, as in torch."""
    _refuse_options(call, max_norm, scale_grad_by_freq, sparse)
    output = F.embedding(input, call.plain(weight), padding_idx)
    return _record(call, input, output, weight, padding_idx)


@rule(torch.embedding)
def embedding_of_cpp(
    call: Call,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return rows of a table for the C++ function: weight first, and `padding_idx` -1 means none."""
    _refuse_options(call, None, scale_grad_by_freq, sparse)
    output = torch.embedding(call.plain(weight), indices, padding_idx)
    return _record(call, indices, output, weight, None if padding_idx == -1 else padding_idx)


def _refuse_options(call: Call, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    if max_norm is not None:
        raise call.refuse("max_norm rescales the table rows that the data reads; drop max_norm", advise=False)
    if scale_grad_by_freq:
        raise call.refuse("scale_grad_by_freq makes gradients depend on the other samples; drop it", advise=False)
    if sparse:
        raise call.refuse("a private gradient is dense (noise reaches every row); set sparse=False", advise=False)


def _record(call: Call, input: Tensor, output: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    source = call.source(weight)
    assert source is not None
    skipped = -1 if padding_idx is None else padding_idx % source.shape[0]
    return _tapped(call, input, output, source, batch_axis(call, input), skipped)


def _tapped(call: Call, ids: Tensor, output: Tensor, source: Source, axis: BatchAxis, skipped: int = -1) -> Tensor:
    """Return the tapped output; reads of `skipped` have no gradient."""
    B = call.batch_size

    def build(ids: Tensor, g: Tensor) -> Sequence[tuple[Source, Record]]:
        ids_BT = axis.split(torch.where(ids == skipped, -1, ids).long(), B).reshape(B, -1)
        values_BTC = axis.split(g, B).reshape(*ids_BT.shape, -1)
        return [(source, EmbeddingRecord(ids_BT, values_BTC, torch.Size(source.shape)))]

    return call.tap(output, (ids,), [source], build)


@rule(
    Tensor.__getitem__,
    *functions_named(["index_select", "take", "gather", "take_along_dim", "repeat_interleave"]),
)
def select(call: Call, table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return elements of a parameter at places that the data chooses.

    The same function, applied to the numbers of the elements, shows which ones.
    """
    source, axis = call.source(table), call.output_axis
    if source is None or axis is None:
        raise call.refuse("a parameter says where it reads the data, or its output carries no samples")
    output = call.func(call.plain(table), *args, **kwargs)
    whole = _read_whole(call.func, table, args)
    read = table.shape[: table.dim() - whole]
    numbers = torch.arange(math.prod(read), device=table.device).view(read)
    ids = call.func(numbers, *args, **kwargs)
    if axis.dim >= ids.dim():
        raise call.refuse("its samples lie in a dimension of the parameter")
    return _tapped(call, ids, output, source, axis)


def _read_whole(func: Callable[..., Any], table: Tensor, args: tuple[Any, ...]) -> int:
    """Return how many trailing dimensions an index keeps whole; 0 is always right."""
    if func is not Tensor.__getitem__:
        return 0
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    plain = all(isinstance(i, (int, slice)) or (isinstance(i, Tensor) and i.dtype != torch.bool) for i in index)
    return table.dim() - len(index) if plain else 0


@composite(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return bags of rows [N, C], for ids [N, T], or for flat ids with the start of each bag."""
    if offsets is None:
        starts = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
    ids = input.flatten()
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    rows = F.embedding(ids, weight, padding, max_norm, norm_type, scale_grad_by_freq, sparse)
    bag = torch.bucketize(torch.arange(len(ids), device=ids.device), starts, right=True) - 1
    kept = torch.ones_like(ids, dtype=rows.dtype) if padding is None else (ids != padding).to(rows.dtype)
    if mode == "max":
        with torch.no_grad():
            *_, highest = torch.embedding_bag(weight.detach(), ids, starts, False, 2, False, None, False, padding)
            filled = kept.new_zeros(len(starts)).index_add_(0, bag, kept) > 0
        return torch.where(filled[:, None], torch.gather(weight, 0, highest.clamp(min=0)), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten()[:, None]
    empty = torch.zeros(len(starts), rows.shape[1], dtype=rows.dtype, device=rows.device)
    total = empty.index_add_(0, bag, rows * kept[:, None])
    return (
        total if mode == "sum" else total / kept.new_zeros(len(starts)).index_add_(0, bag, kept).clamp(min=1)[:, None]
    )
