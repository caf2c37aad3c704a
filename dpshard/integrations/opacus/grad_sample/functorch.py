"""A model as a function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def make_functional(model: nn.Module) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return f(parameters, *inputs), and copies of the model's parameters."""
    names = [name for name, _ in model.named_parameters()]

    def run(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(model, dict(zip(names, parameters, strict=True)), args, kwargs)

    return run, tuple(p.detach().clone() for p in model.parameters())
