"""Steps of own batches beside one sample at a time, for calls that differ."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tests.oracle import (
    TOLERANCE,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    per_sample_gradients,
    ramp_loss,
    relative_error,
)

R = 0.1
SAMPLES = 6

Call = tuple[Tensor, tuple[Any, ...]]
"""Data and further arguments."""


class _Called(nn.Module):
    def __init__(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, *self.arguments)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return a copy that nothing compiles."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module._compiled_call_impl = None
    return plain


def require_exact_steps(
    model: nn.Module,
    calls: Sequence[Call],
    change: Callable[[nn.Module], object] = lambda _: None,
    *,
    changes: Sequence[int] = (),
    **options: Any,
) -> None:
    """Take a step for each call; before those numbered in `changes`, `change` the model."""
    plain = uncompiled(model)
    engine = noise_free_engine(model, batch_size=SAMPLES, steps=len(calls), max_grad_norm=R, **options)
    for step, (x, arguments) in enumerate(calls):
        if step in changes:
            change(model)
            change(plain)
        gradients = per_sample_gradients(_Called(plain, arguments), (x,))
        named = [{name.removeprefix("model."): g for name, g in of_sample.items()} for of_sample in gradients]
        expected = clipped_mean(named, max_grad_norm=R, batch_size=SAMPLES)
        ramp_loss(model(x, *arguments)).backward()
        engine.privatize()
        assert relative_error(gradients_of(model), expected) <= TOLERANCE, step
        model.zero_grad()
