"""Losses of tokens outside the model, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.errors import ConfigurationError
from dpshard.losses import sample_losses

OWN_LOSS = (
    "Pass compute_loss_func=f; f(outputs, labels, num_items_in_batch) must return the mean over samples of each "
    "sample's own loss."
)


def uneven(labels: Tensor) -> Tensor:
    """Return `labels` with only one token in the first sample, so that means over tokens and samples differ.

    Labels without -100 stay: the loss may ignore another number, and refuse this one.
    """
    if labels.dim() < 2 or labels.is_floating_point() or not bool((labels == -100).any()):
        return labels
    uneven = labels.clone()
    first = uneven[0].view(-1)
    first[(first != -100).nonzero().view(-1)[:-1]] = -100
    return uneven


def token_losses(outputs: Any, labels: Tensor, shift: bool) -> Tensor:
    """Return the cross-entropy [B] for `labels` [B, T]; with `shift`, for the labels of the next positions."""
    logits = logits_of(outputs, labels)
    return sample_losses(logits[:, :-1], labels[:, 1:]) if shift else sample_losses(logits, labels)


def logits_of(outputs: Any, labels: Tensor) -> Tensor:
    """Return logits [B, T, C] for `labels` [B, T]. Raises ConfigurationError for other shapes."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if logits.shape[:-1] != labels.shape:
        raise ConfigurationError(
            f"labels {tuple(labels.shape)} do not name a class for every position of the logits "
            f"{tuple(logits.shape)}. {OWN_LOSS}"
        )
    return logits


def learn_shift(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return True if the model's own loss predicts the next token; ConfigurationError if undecided."""
    labels = inputs["labels"]
    one = {
        name: x[:1] if isinstance(x, Tensor) and x.dim() and len(x) == len(labels) else x for name, x in inputs.items()
    }
    one["labels"] = labels[:1].clamp(min=0)  # no label is ignored
    model.eval()
    with torch.no_grad():
        # Labels: the likeliest class, but the least likely one at position 0. So the two losses differ.
        _, rest = _loss_and_rest(model(**one))
        logits = logits_of(rest, one["labels"])
        one["labels"] = logits.argmax(-1)
        one["labels"][:, 0] = logits[:, 0].argmin(-1)
        loss, rest = _loss_and_rest(model(**one))
    model.train()
    own, eps = float(loss), torch.finfo(loss.dtype).eps
    tolerance = max(1e-3, 2 * eps) * max(1.0, abs(own))
    apart = [abs(float(token_losses(rest, one["labels"], shift)) - own) for shift in (False, True)]
    if not min(apart) <= tolerance:
        raise ConfigurationError(
            f"The loss of {type(model).__name__} is not the mean cross-entropy of its tokens (it is {own:g} on one "
            f"sample, {min(apart):g} apart). So it cannot be taken sample by sample. A term that balances experts "
            f"mixes samples: switch it off. {OWN_LOSS}"
        )
    if max(apart) <= 10 * min(apart) + 2 * eps * max(1.0, abs(own)):
        raise ConfigurationError(
            f"The labels of {type(model).__name__} may name the token at a position, or the token after it: on one "
            f"sample both losses are equal. {OWN_LOSS}"
        )
    return apart[1] < apart[0]


def _loss_and_rest(outputs: Any) -> tuple[Tensor, Any]:
    return (outputs["loss"], outputs) if isinstance(outputs, Mapping) else (outputs[0], outputs[1:])
