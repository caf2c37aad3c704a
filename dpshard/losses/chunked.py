"""Cross-entropy of a vocabulary head without its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from dpshard.errors import ConfigurationError
from dpshard.losses.head import Head, Positions, head_of, positions_of, rho, without_autocast
from dpshard.losses.samples import of_samples


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    per: Literal["sample-mean", "sample-sum", "token"] = "sample-mean",
    reduction: Literal["none", "mean"] = "none",
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return `sample_losses(F.linear(hidden, weight, bias), labels)`, [B], a chunk of classes at a time.

    Shapes: `hidden` [B, T, D] with `labels` [B, T], or other dimensions between B and D. `weight` is [V, D], V > 1,
    `bias` [V]. Losses are float32 or wider. No logits [B, T, V] exist: a chunk has `chunk_size` classes, by default
    some 4 million logits.

    `per`: see `sample_losses`; "token" returns the loss of every position, 0 where the label is `ignore_index`.
    `reduction` "mean" returns the mean over samples or positions. With `softcap` c, logits are c tanh(logits / c), as
    with `final_logit_softcapping` of Gemma 2 and VaultGemma.

    Call it in the model's forward, because an engine intercepts no calls outside. It works without an engine, too.
    Raises ConfigurationError for other shapes, and DataError for a label that is no class. On a GPU such a label gives
    NaN, or an assertion of the device.
    """
    _require_fitting(hidden, weight, labels, bias)
    if per not in ("sample-mean", "sample-sum", "token"):
        raise ConfigurationError(f"per is {per!r}; pass 'sample-mean', 'sample-sum' or 'token'.")
    if reduction not in ("none", "mean"):
        raise ConfigurationError(f"reduction is {reduction!r}; pass 'none' or 'mean'.")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigurationError(f"chunk_size is {chunk_size}; pass a number of classes of at least 1, or None.")
    if softcap is not None and not softcap > 0:
        raise ConfigurationError(f"softcap is {softcap}; pass the largest logit, above 0, or None.")
    counted = labels != ignore_index
    # A masked_fill, not a product: 0 * inf is NaN.
    classes = labels.masked_fill(~counted, 0)
    tokens = token_losses(hidden, weight, classes, bias, chunk_size, softcap).masked_fill(~counted, 0)
    losses = tokens if per == "token" else of_samples(tokens, counted, per)
    return losses.mean() if reduction == "mean" else losses


def _require_fitting(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if hidden.shape[:-1] != labels.shape or labels.dim() == 0:
        raise ConfigurationError(
            f"hidden has shape {tuple(hidden.shape)}, which is not the shape of labels, {tuple(labels.shape)}, plus "
            f"the features. Pass hidden [B, T, D] with labels [B, T], or [B, D] with [B]."
        )
    sharded = hasattr(weight, "placements")  # a DTensor
    if sharded or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) < 2:
        found = f"{tuple(weight.shape)}{', in shards' if sharded else ''}"
        raise ConfigurationError(
            f"weight has shape {found}. Pass the head's weight [V, {hidden.shape[-1]}], with V > 1 classes. A sharded "
            f"weight (FSDP, ZeRO-3) is whole only in the forward of the module that owns it: call "
            f"chunked_cross_entropy there."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigurationError(f"bias has shape {tuple(bias.shape)}; pass one number per class, [{len(weight)}].")


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_size: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the cross-entropy [*labels.shape] of every position; an engine's rule replaces this function."""
    tensors = (hidden, weight, labels) if bias is None else (hidden, weight, labels, bias)
    if has_torch_function(tensors):
        return handle_torch_function(token_losses, tensors, hidden, weight, labels, bias, chunk_size, softcap)
    head = head_of(hidden, weight, bias, chunk_size, softcap)
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    return _TokenLosses.apply(flat, weight, bias, labels.reshape(1, -1), head).view(labels.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
        ctx.head = replace(head, weight=weight.detach(), bias=None if bias is None else bias.detach())
        with without_autocast(hidden.device):
            at = positions_of(ctx.head, hidden, labels, pull=ctx.needs_input_grad[0], gram=None)
        trained = any(ctx.needs_input_grad[1:3])
        kept = (hidden, labels, weight, bias) if trained else (None,) * 4
        ctx.save_for_backward(at.label_logit, at.top, at.total, at.pulled, at.label_slope, *kept)
        return at.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (g_BT,) = gradients
        *parts, hidden, labels, weight, bias = ctx.saved_tensors
        label_logit, top, total, pulled, label_slope = parts
        at = Positions(label_logit, top, total, pulled, None, label_slope)
        scale_BT1 = (g_BT * at.missing)[..., None]
        g_hidden = None if at.pulled is None else (at.pulled * scale_BT1).to(ctx.head.dtype)
        if hidden is None:
            return g_hidden, None, None, None, None
        g_weight, g_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        cols_ND = (hidden.to(ctx.head.dtype) * scale_BT1)[0]
        with without_autocast(hidden.device):
            for classes in ctx.head.chunks():
                rows_NV = rho(at, ctx.head, hidden, labels, classes)[0]
                g_weight[classes] = rows_NV.T @ cols_ND
                if g_bias is not None:
                    g_bias[classes] = rows_NV.T @ scale_BT1[0, :, 0]
        return g_hidden, g_weight, g_bias, None, None
