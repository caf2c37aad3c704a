"""The user's own network: `--model package.module:function`."""

from __future__ import annotations

import hashlib
import re

import torch
from torch import nn

from dpshard.applications import user_code
from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.settings import OWN_MODEL
from dpshard.backends.ranks import Ranks
from dpshard.errors import ConfigurationError


def is_own(name: str) -> bool:
    """Return True if `name` is package.module:function."""
    return re.fullmatch(OWN_MODEL, name) is not None


def build(name: str, data: Data) -> nn.Module:
    """Return the network of `name` for the shape of one x and the number of classes.

    Raises ConfigurationError if the function cannot be imported, or returns no module with logits [B, classes], or
    [B, T, classes] for a language model.
    """
    model = user_code.load(name)(tuple(data.example().shape), data.classes)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model={name!r} returned {type(model).__name__}, not a torch.nn.Module.")
    _check_logits(name, model, data)
    return model


def require_equal(model: nn.Module, name: str, ranks: Ranks) -> None:
    """Raise ConfigurationError on all ranks unless `model` has equal values on all."""
    digest = hashlib.sha256()
    for x in model.state_dict().values():
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if len(set(ranks.gather(digest.hexdigest()))) > 1:
        raise ConfigurationError(
            f"model={name!r} returned other weights on other ranks. Draw them from torch's generator, which "
            f"--seed seeds, or read them from one file."
        )


def _check_logits(name: str, model: nn.Module, data: Data) -> None:
    x = torch.stack([torch.as_tensor(data.example())] * 2)
    model.eval()
    with torch.no_grad():
        logits = model(x)
    model.train()
    expected = (2, *x.shape[1:], data.classes) if data.kind in (Kind.LANGUAGE, Kind.MASKED) else (2, data.classes)
    found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != expected:
        raise ConfigurationError(
            f"model={name!r}: for two samples, x {tuple(x.shape)}, the model returned {found}; it must return the "
            f"logits, {expected}. Wrap the model in a module that returns only its logits."
        )
