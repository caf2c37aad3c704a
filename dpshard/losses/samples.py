"""Per-sample losses that do not depend on the other samples of the micro-batch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.errors import ConfigurationError
from dpshard.losses.head import wide


def sample_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    per: Literal["sample-mean", "sample-sum"] = "sample-mean",
) -> Tensor:
    """Return the cross-entropy [B] of each sample, float32 or wider.

    Shapes: `logits` [B, T, C] with `labels` [B, T], or other dimensions between B and C. Positions with label
    `ignore_index` do not count. "sample-mean" divides by the number of counted positions of the sample, if any;
    "sample-sum" does not. `F.cross_entropy` would divide by the tokens of the micro-batch. Then a sample's gradient
    would depend on other samples, which the noise does not cover.

    For a causal language model, pass `logits[:, :-1]` and `ids[:, 1:]`. Call backward() on the mean over the samples,
    or on the sum with `PrivacyEngine(loss_reduction="sum")`. Raises ConfigurationError for other shapes.
    """
    if logits.shape[:-1] != labels.shape or labels.dim() == 0:
        raise ConfigurationError(
            f"logits have shape {tuple(logits.shape)}, which is not the shape of labels, {tuple(labels.shape)}, plus "
            f"the classes. Pass logits [B, T, C] with labels [B, T], or [B, C] with [B]."
        )
    if per not in ("sample-mean", "sample-sum"):
        raise ConfigurationError(f"per is {per!r}; pass 'sample-mean' or 'sample-sum'.")
    losses = F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index)
    return of_samples(losses, labels != ignore_index, per)


def of_samples(losses: Tensor, counted: Tensor, per: str) -> Tensor:
    """Return the loss [B] of each sample, from those of positions; `counted` [B, ...]: those that count."""
    total_B = losses.reshape(len(counted), -1).sum(1)
    return total_B / counted.reshape(len(counted), -1).sum(1).clamp(min=1) if per == "sample-mean" else total_B


def packed_cross_entropy(
    logits: Tensor, labels: Tensor, unit_ids: Tensor, units: int, *, causal: bool = True, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy [units] of each unit of packed rows, float32 or wider; 0 for one without labels.

    Shapes: `logits` [R, T, C], `labels` and `unit_ids` [R, T], with the units 0, 1, ... and -1 for padding; R = 1 may
    be left out. `causal`: each token predicts the next one's label within its unit; otherwise its own. `units` is the
    `micro_batch_size` of `engine.batches`, which is public. Call backward() on the mean, or on the sum with
    `PrivacyEngine(loss_reduction="sum")`. A mean over tokens would make a unit's gradient depend on the others. Raises
    ConfigurationError for other shapes.
    """
    logits = logits[None] if logits.dim() == 2 else logits
    labels, unit_ids = (x[None] if x.dim() == 1 else x for x in (labels, unit_ids))
    if logits.dim() != 3 or logits.shape[:-1] != labels.shape or labels.shape != unit_ids.shape:
        raise ConfigurationError(
            f"logits have shape {tuple(logits.shape)}, labels {tuple(labels.shape)} and unit_ids "
            f"{tuple(unit_ids.shape)}. Pass logits [R, T, C] with labels and unit_ids [R, T]."
        )
    counted = unit_ids >= 0
    if causal:
        counted = counted[:, 1:] & (unit_ids[:, 1:] == unit_ids[:, :-1])
        logits, labels, unit_ids = logits[:, :-1], labels[:, 1:], unit_ids[:, 1:]
    counted = counted & (labels != ignore_index)
    targets = labels.masked_fill(~counted, ignore_index).flatten()
    losses = F.cross_entropy(wide(logits).flatten(0, -2), targets, reduction="none", ignore_index=ignore_index)
    place = torch.where(counted, unit_ids, units).flatten()
    totals, counts = (x.new_zeros(units + 1).index_add(0, place, x)[:units] for x in (losses, torch.ones_like(losses)))
    return totals / counts.clamp(min=1)
