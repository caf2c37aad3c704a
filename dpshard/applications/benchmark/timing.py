"""Times of steps in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

Step = Callable[[], object]
"""A step; the device may still compute when it returns."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the median and quartiles of figures."""
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0], 1)
        low, median, high = quantiles(figures, n=4, method="inclusive")
        return cls(median, low, high, len(figures))


def interleave(
    steps: Mapping[str, Step], *, rounds: int, warmup: int = 2, on_step: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Return the seconds of every step in each round, taken once in random order."""
    for name, step in steps.items():
        for _ in range(warmup):
            step()
            on_step(name)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffler = list(steps), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            synchronize()
            begun = time.perf_counter()
            steps[name]()
            synchronize()
            times[name].append(time.perf_counter() - begun)
            on_step(name)
    return times


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Return the spread of ratios."""
    return Spread.of([a / b for a, b in zip(times, baseline, strict=True)])


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
