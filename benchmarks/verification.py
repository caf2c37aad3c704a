"""The cost of verification: the first one, the later ones, and the look at the model before every forward."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.workloads import Workload, loss
from dpshard import PrivacyEngine

RUN = 1_000
"""Steps of the run over which the costs are spread, of one micro-batch each."""


class _Clock:
    """Adds up the seconds of a method, and keeps those of each call."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.calls: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self._method(*args, **kwargs)
        finally:
            self.calls.append(time.perf_counter() - begun)


def measure(workload: Workload, *, steps: int, device: str) -> dict[str, float]:
    """Return seconds of a private step, of verifications, and of the look; and their share of `RUN` steps."""
    x, y = (part.to(device) for part in workload.data(workload.batch))
    model = workload.build().to(device).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(model, batch_size=workload.batch, sample_size=len(x), steps=steps, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    verifier = engine._verifier
    verified = _Clock(verifier.verify)
    looks = [_Clock(verifier.before_forward), _Clock(verifier.before_release)]
    verifier.verify, verifier.before_forward, verifier.before_release = verified, *looks  # type: ignore[method-assign]
    ordinary, look, first, later = [], [], 0.0, []
    begun = time.perf_counter()
    for logical_batch in engine.batches(TensorDataset(x, y), workload.batch):
        for x_B, y_B in logical_batch:
            loss(model(x_B), y_B).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begun
        if not verified.calls:
            look.append(sum(sum(clock.calls) for clock in looks))
            ordinary.append(seconds - look[-1])
        elif engine.step == 1:
            first = sum(verified.calls)
        else:
            later.append(sum(verified.calls))
        for clock in (verified, *looks):
            clock.calls.clear()
        begun = time.perf_counter()
    found = {"seconds": median(ordinary), "first": first, "later": median(later), "look": median(look)}
    return found | {"share": share(**found)}


def share(seconds: float, first: float, later: float, look: float) -> float:
    """Return the share of `RUN` ordinary steps that verification adds: at steps 1, 2, 4, ..., and in every look."""
    repeats = RUN.bit_length() - 1
    return (first + repeats * later + RUN * look) / (RUN * seconds)
