"""How much one sample counts for, whatever a training loop does.

The oracle shares no code with the library. Every sample is drawn (q = 1), no noise is added, and SGD steps with
learning rate 1. So the parameters move by the clipped sum over the batch size. The loop runs with all samples, and
again without each one of `left_out`. `influence` is the largest distance between two clipped sums, over R: 1 is
allowed.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from dpshard import DpshardError, PrivacyEngine

R = 1.0
ALLOWED = 1 + 1e-4
"""A clipped gradient may exceed R by rounding."""

Loop = Callable[[nn.Module, PrivacyEngine, torch.optim.Optimizer, Any], None]
"""The user's code for one step: (model, engine, optimizer, dataset) -> None."""


def clipped_sum(build: Callable[[], nn.Module], loop: Loop, dataset: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the clipped sum that `loop` releases, by parameter, in float64, always from one seed."""
    torch.manual_seed(0)
    model = build().train()
    n = len(dataset)
    chosen = {"max_grad_norm": R, "clipping_fn": "abadi", "steps": 1, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noise_multiplier=0, and a user's own loops
        engine = PrivacyEngine(model, batch_size=n, sample_size=n, noise_multiplier=0.0, **chosen)
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            loop(model, engine, optimizer, dataset)
        finally:
            engine.detach()
    return {name: (before[name] - p.detach().double()) * n for name, p in model.named_parameters()}


def influence(
    build: Callable[[], nn.Module], loop: Loop, dataset: Any, *, left_out: Iterable[int] | None = None, **settings: Any
) -> float:
    """Return the largest change of the clipped sum, over R, when one of `left_out` (default: any sample) leaves."""
    whole = clipped_sum(build, loop, dataset, **settings)
    largest = 0.0
    for i in range(len(dataset)) if left_out is None else left_out:
        rest = Subset(dataset, [j for j in range(len(dataset)) if j != i])
        without = clipped_sum(build, loop, rest, **settings)
        apart = torch.stack([(whole[name] - without[name]).norm() for name in whole]).norm()
        largest = max(largest, float(apart) / settings.get("max_grad_norm", R))
    return largest


def is_refused(build: Callable[[], nn.Module], loop: Loop, dataset: Any, **settings: Any) -> str | None:
    """Return the message of the DpshardError that stops `loop`, or None."""
    try:
        clipped_sum(build, loop, dataset, **settings)
    except DpshardError as error:
        return str(error)
    return None


def assert_exact_or_refused(build: Callable[[], nn.Module], loop: Loop, dataset: Any, **settings: Any) -> None:
    """Fail if a sample silently counts for more than R."""
    try:
        found = influence(build, loop, dataset, **settings)
    except DpshardError:
        return
    assert found <= ALLOWED, f"one sample moves the clipped sum by {found:.3f} R, and nothing was said"
