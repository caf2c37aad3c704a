"""Losses of which every sample has its own, whatever the other samples of the micro-batch are."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from dpshard.errors import ConfigurationError


def sample_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    per: Literal["sample-mean", "sample-sum"] = "sample-mean",
) -> Tensor:
    """Cross-entropy of each sample on its own, [B], float32 or wider.

    `logits` [B, T, C] and `labels` [B, T] (or any number of dimensions between B and C; or [B, C] and [B]). Positions
    whose label is `ignore_index` do not count. "sample-mean" divides by the number of positions that count in this
    sample (a sample without any has loss 0), "sample-sum" by nothing. Neither divides by the tokens of the micro-batch,
    as `F.cross_entropy` does: that would make the gradient of a sample depend on the length of the others, before it
    is clipped, and no noise covers that.

    A causal language model predicts the next token: pass `logits[:, :-1]` and `ids[:, 1:]`. The loss to call
    backward() on is the mean over the samples, or the sum with `PrivacyEngine(loss_reduction="sum")`.
    """
    if logits.shape[:-1] != labels.shape or labels.dim() == 0:
        raise ConfigurationError(
            f"logits have shape {tuple(logits.shape)}, which is not that of labels, {tuple(labels.shape)}, and the "
            f"classes. Pass logits [B, T, C] with labels [B, T], or [B, C] with [B]."
        )
    if per not in ("sample-mean", "sample-sum"):
        raise ConfigurationError(f"per is {per!r}; pass 'sample-mean' or 'sample-sum'.")
    # Half precision would not resolve the sum of many tokens.
    wide = logits.float() if logits.element_size() < 4 else logits
    losses = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index)
    total_B = losses.view(len(labels), -1).sum(1)
    if per == "sample-sum":
        return total_B
    return total_B / (labels != ignore_index).view(len(labels), -1).sum(1).clamp(min=1)
