"""A user's model to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpshard.applications import user_code
from dpshard.errors import ConfigurationError

USAGE = (
    "Name a function without arguments as package.module:function; it returns (model, x, y, loss_fn): a new "
    "torch.nn.Module, one micro-batch of inputs (a tensor, a tuple of them, or a dict by keyword) and of targets, "
    "samples first, and loss_fn(model(x), y), the mean loss over the micro-batch."
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, B samples, and their loss."""

    model: nn.Module
    x: Any
    """A tensor, a tuple (positional), or a dict (by keyword)."""
    y: Any
    """A tensor, tuple or dict."""
    loss_fn: Callable[[Any, Any], Tensor]

    @property
    def rows(self) -> int:
        """Samples B."""
        return len(tree_flatten(self.x)[0][0])

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def loss(self, x: Any, y: Any) -> Tensor:
        """Return the mean loss []."""
        if isinstance(x, Mapping):
            output = self.model(**x)
        else:
            output = self.model(*x) if isinstance(x, tuple) else self.model(x)
        return self.loss_fn(output, y)


def load(path: str) -> Callable[[], Subject]:
    """Return the function at `path` (package.module:function), which checks its results.

    Raises ConfigurationError without one.
    """
    function = user_code.load(path)
    return lambda: _subject(path, function)


def _subject(path: str, function: Callable[[], Any]) -> Subject:
    try:
        made = function()
    except TypeError as error:
        raise ConfigurationError(f"{path} could not be called without arguments ({error}). {USAGE}") from error
    if not isinstance(made, tuple) or len(made) != 4:
        raise ConfigurationError(f"{path} returned {_kind(made)}, not a tuple of four. {USAGE}")
    parts: list[Any] = list(made)
    model, x, y, loss_fn = parts
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{path}: the first result is {_kind(model)}, not a torch.nn.Module. {USAGE}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError(f"{path}: {type(model).__name__} has no trainable parameter.")
    if not callable(loss_fn):
        raise ConfigurationError(f"{path}: the last result is {_kind(loss_fn)}, not a function. {USAGE}")
    lengths = set()
    for what, tree in (("inputs", x), ("targets", y)):
        leaves = tree_flatten(tree)[0]
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            raise ConfigurationError(f"{path}: the {what} are {_kind(tree)}, not tensors with samples first. {USAGE}")
        lengths |= {len(leaf) for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigurationError(f"{path}: tensors have {sorted(lengths)} rows; each needs one row per sample.")
    return Subject(model.train(), x, y, parts[3])


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"of type {type(value).__name__}"
