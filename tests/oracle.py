"""What a private step must be: one sample at a time, plain loops, plain autograd, float64; and how to compare with it.

An update is compared as a whole: the worst parameter's error over the norm of the whole gradient, so that a parameter
with a small gradient is not held to digits that the sum does not have, nor a large one allowed to hide it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpshard import PrivacyEngine

DEVICE = os.environ.get("DPSHARD_TEST_DEVICE")
"""Device of private steps and of what they are compared with; None: that of the model and the data."""

TOLERANCE = 1e-10
"""Largest relative error of an update in float64."""


def randn(*shape: int) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.randn(shape, dtype=torch.float64)


Gradients = dict[str, Tensor]
Loss = Callable[..., Tensor]


def ramp_loss(output: Tensor, *_: Tensor) -> Tensor:
    """Return a loss of any output [B, ...], averaged over samples: not linear, different for every element."""
    flat = output.reshape(len(output), -1)
    return (flat.sin() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)).sum(1).mean()


def per_sample_gradients(model: nn.Module, data: Sequence[Tensor], loss: Loss = ramp_loss) -> list[Gradients]:
    """The gradient of every sample's own loss; `data` is the model's input, then what the loss wants, row by row."""
    data = there(model, data)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(len(data[0])):
        x, *rest = (rows[i : i + 1] for rows in data)
        value = loss(model(x), *rest)
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
        found.append({name: zeros[name] if g is None else g for name, g in zip(parameters, gradients, strict=True)})
    return found


def there(model: nn.Module, data: Sequence[Tensor]) -> list[Tensor]:
    """Move a model to DEVICE; return the data there. The oracle and `private_step` do so, too."""
    if DEVICE is None:
        return list(data)
    model.to(DEVICE)
    return [rows.to(DEVICE) for rows in data]


def norm(gradients: Gradients, names: Sequence[str] | None = None) -> float:
    """Return the L2 norm of a gradient, over all or the named parameters, and both parts of complex ones."""
    return math.sqrt(sum(float(gradients[name].abs().double().square().sum()) for name in names or gradients))


def factor(norm: float, threshold: float, clipping_fn: str) -> float:
    """Return the clipping factor of one sample."""
    if clipping_fn == "abadi":
        return min(1.0, threshold / norm) if norm > 0 else 1.0
    if clipping_fn == "automatic":
        return threshold / (norm + 0.01)
    assert clipping_fn == "global"
    return 1.0 if norm <= threshold else 0.0


def clipped_mean(
    per_sample: Sequence[Gradients],
    *,
    max_grad_norm: float,
    batch_size: float,
    clipping_fn: str = "abadi",
    groups: Sequence[Sequence[str]] | None = None,
) -> Gradients:
    """Return sum_i C_i g_i / batch_size; each of the M groups of names has the threshold max_grad_norm / sqrt(M)."""
    groups = groups or [list(per_sample[0])]
    total = {name: torch.zeros_like(g) for name, g in per_sample[0].items()}
    for gradients in per_sample:
        for group in groups:
            c = factor(norm(gradients, group), max_grad_norm / math.sqrt(len(groups)), clipping_fn)
            for name in group:
                total[name] += c * gradients[name]
    return {name: g / batch_size for name, g in total.items()}


def _double(x: Tensor) -> Tensor:
    return x.to("cpu", torch.complex128 if x.is_complex() else torch.float64)


def relative_error(update: Gradients, expected: Gradients) -> float:
    """Return the worst parameter's error over the norm of the whole expected gradient."""
    assert update.keys() == expected.keys()
    errors = {name: norm({name: _double(update[name]) - _double(expected[name])}) for name in expected}
    assert all(math.isfinite(error) for error in errors.values()), errors
    return max(errors.values()) / norm(expected)


def noise_free_engine(model: nn.Module, **options: Any) -> PrivacyEngine:
    """Return an engine without noise, and without the warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "noise_multiplier=0")
        return PrivacyEngine(
            model, **{"sample_size": 1000, "steps": 1, "noise_multiplier": 0, "clipping_fn": "abadi", **options}
        )


def gradients_of(model: nn.Module) -> Gradients:
    """Return `.grad` of the trainable parameters, or zeros."""
    return {
        name.replace("_orig_mod.", ""): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def private_step(
    model: nn.Module,
    data: Sequence[Tensor],
    loss: Loss = ramp_loss,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    batch_size: int | None = None,
    call: Callable[..., Any] | None = None,
    steps: int = 1,
    **options: Any,
) -> Gradients:
    """Return the gradients that an optimizer sees in one noise-free step over `data`, by the public API.

    `call` replaces the model in forward (by a compiled one, for example). Return those of the last of equal `steps`:
    from the second on, plans of calls are repeated. Other options are the engine's.
    """
    data = there(model, data)
    B = len(data[0])
    engine = noise_free_engine(model, batch_size=batch_size or B, steps=steps, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    splits = [torch.split(rows, list(micro_batch_sizes or [B])) for rows in data]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This loop feeds its own batches")
            warnings.filterwarnings("ignore", "No gradient reached")  # the oracle has zeros there, too
            for _ in range(steps):
                optimizer.zero_grad()
                for x, *rest in zip(*splits, strict=True):
                    loss((call or model)(x), *rest).backward()
                optimizer.step()
        return gradients_of(model)
    finally:
        engine.detach()
        model.zero_grad()


class Use(nn.Module):
    """A network around one use of parameters, `use(self, x)`, after a trainable map.

    The map acts on the last dimension, of `before` elements, and shows that the gradient of the use's input is right.
    """

    def __init__(self, use: Callable[..., Tensor], *, before: int = 0, **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.use = use
        if before:
            self.before = nn.Linear(before, before)
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.before(x) if hasattr(self, "before") else x)


MODES = ("auto", "bk", "ghost", "per-example")
"""Modes with different norms, passes and kept tensors."""


def assert_exact(
    model: nn.Module,
    data: Sequence[Tensor] | Tensor,
    loss: Loss = ramp_loss,
    *,
    modes: Sequence[str] = MODES,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Assert that the update of a step is the oracle's in every mode, with about half of the samples clipped.

    Only the first mode verifies the model, which takes forty forwards; tests/verification covers all modes.
    """
    data = (data,) if isinstance(data, Tensor) else data
    model = model.double()
    per_sample = per_sample_gradients(model, data, loss)
    assert all(norm(g) > 0 for g in per_sample)
    norms = sorted(norm(g) for g in per_sample)
    R = norms[len(norms) // 2] * 0.999
    expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=len(data[0]))
    for mode in modes:
        once = {"verify": mode == modes[0], "clipping_mode": mode, "max_grad_norm": R}
        once["steps"] = 1 if mode == modes[0] else 2
        update = private_step(model, data, loss, **{**once, **options})
        error = relative_error(update, expected)
        assert error <= tolerance, f"{mode}: relative error {error:.2e}"
