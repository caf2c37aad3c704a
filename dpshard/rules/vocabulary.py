"""`dpshard.losses.chunked_cross_entropy`: a vocabulary head and its loss in one use.

[Note: A head that was written]
Backward computes the logits again. If the weights were written since, a gradient could exceed its measured norm without
bound. Versions of tensors reveal most writes, and checksums reveal those through `.data` or NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpshard.losses.chunked import token_losses
from dpshard.losses.head import Head, Positions, head_of, positions_of, without_autocast, written_weights_error
from dpshard.records import HeadRecord, Record, checksum, gram
from dpshard.records.precision import exact_products
from dpshard.rules.call import Call, Source, batch_axis
from dpshard.rules.registry import rule

_GRAM_PAYS = 4
"""Largest T / D for which Gram matrices cost less than gradients in chunks.

Gram matrices cost T / (2 D) to T / D products of the head, and gradients in chunks cost two.
"""


@rule(token_losses)
def chunked_token_losses(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_size: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the losses [..., T] of positions, for hidden [..., T, D], a weight [V, D] and a bias [V]."""
    axis, B = batch_axis(call, hidden), call.batch_size
    if axis.routed:
        raise call.refuse("the data picked its rows; pass all positions, and ignore_index as their label", advise=False)
    if axis.dim == hidden.dim() - 1 or torch.is_complex(hidden) or torch.is_complex(weight):
        raise call.refuse("its input is not [B, ..., D] of real numbers", advise=False)
    k = hidden.shape[axis.dim] // B
    apart = axis.split(hidden, B)
    labels_BT = axis.split(labels, B).reshape(B, -1)
    head = head_of(hidden, call.plain(weight), call.plain(bias), chunk_size, softcap)
    if not torch.compiler.is_compiling():
        head = replace(head, versions=head.versions_now())
    w, b = call.source(weight), call.source(bias)
    sources = [source for source in (w, b) if source is not None]
    bits = _bits(head) if sources and not torch.compiler.is_compiling() else None
    output, at = _losses(apart.reshape(B, -1, hidden.shape[-1]), labels_BT, head, compare=bool(sources))

    def build(hidden_BTD: Tensor, labels_BT: Tensor, g_BT: Tensor) -> Sequence[tuple[Source, Record]]:
        scale_BT = g_BT * at.missing
        if bits is not None:
            scale_BT = unless_written(scale_BT, _bits(head) == bits, wait=scale_BT.device.type == "cpu")
        return [
            (source, HeadRecord(hidden_BTD, labels_BT, scale_BT, head, at, torch.Size(source.shape)))
            for source in sources
        ]

    keep = (apart.reshape(B, -1, hidden.shape[-1]), labels_BT)
    tapped = call.tap(output, keep, sources, build)
    return axis.merge(tapped.view(apart.shape[:-1]), k)


def _bits(head: Head) -> Tensor:
    return torch.stack([checksum(x) for x in (head.weight, head.bias) if x is not None])


def unless_written(scale_BT: Tensor, same: Tensor, *, wait: bool) -> Tensor:
    """Return `scale_BT` if all of `same` hold; see [Note: A head that was written].

    Otherwise raise LogicalBatchError. Unless `wait`, return NaN instead, which drops the samples without a wait for the
    device.
    """
    if not wait:
        return torch.where(same.all(), scale_BT, torch.nan)
    if not bool(same.all()):
        raise written_weights_error()
    return scale_BT


def _losses(hidden_BTD: Tensor, labels_BT: Tensor, head: Head, *, compare: bool) -> tuple[Tensor, Positions]:
    compare = compare and hidden_BTD.shape[1] <= _GRAM_PAYS * hidden_BTD.shape[2]
    # As the clipped sum repeats these products; see [Note: Why not TF32] in records/precision.py.
    with torch.no_grad(), without_autocast(hidden_BTD.device), exact_products(hidden_BTD.device):
        at = positions_of(
            head, hidden_BTD.detach(), labels_BT, pull=hidden_BTD.requires_grad, gram=gram if compare else None
        )
    loss_BT = at.loss
    if at.pulled is None:
        return loss_BT, at
    pulled, at.pulled = at.pulled.mul_(at.missing[..., None]).to(head.dtype), None
    return _Pull.apply(hidden_BTD, loss_BT, pulled), at


class _Pull(torch.autograd.Function):
    """`loss` [B, T], whose gradient by the input is `pulled` [B, T, D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, pulled: Tensor) -> Tensor:
        ctx.save_for_backward(pulled)
        ctx.dtype = hidden.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (pulled,) = ctx.saved_tensors
        return (pulled * gradients[0][..., None]).to(ctx.dtype), None, None
