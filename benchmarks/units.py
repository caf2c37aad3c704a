"""The cost of units of several rows over ordinary training on as many rows."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpshard import PrivacyEngine
from dpshard.applications.benchmark.memory import in_fresh_process, peak_of
from dpshard.applications.transformer import GPT, Block

ROWS = 48
"""Rows of a step."""
SIZES = (1, 4, 16)
"""Rows of a unit."""


def images(*, tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a convolutional network with group norm, with images and labels."""
    width, size = (8, 8) if tiny else (32, 16)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(3):
        layers += [nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, stride=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return model, torch.randn(ROWS, 3, size, size), torch.randint(0, 10, (ROWS,))


def text(*, tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a GPT with tied weights, with tokens and the next ones."""
    width, length, depth = (16, 8, 1) if tiny else (128, 64, 2)
    model = GPT(1000, length, width, depth, lambda: Block(width, 4, causal=True))
    return model, torch.randint(0, 1000, (ROWS, length)), torch.randint(0, 1000, (ROWS, length))


MODELS: dict[str, Callable[..., tuple[nn.Module, Tensor, Tensor]]] = {"CNN, 16 x 16": images, "GPT, T = 64": text}


def step_of(name: str, rows_per_unit: int | None, *, tiny: bool) -> Callable[[], None]:
    """Return a training step on ROWS rows; `rows_per_unit` None: an ordinary one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x, y = MODELS[name](tiny=tiny)
    if rows_per_unit is not None:
        warnings.simplefilter("ignore")
        m = ROWS // rows_per_unit
        PrivacyEngine(
            model, batch_size=m, sample_size=100 * m, steps=10_000, noise_multiplier=1.0, rows_per_unit=rows_per_unit
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        scores = model(x)
        F.cross_entropy(scores.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5 if rows_per_unit is not None else 1):  # steps 0, 1, 2, 4 are verified
        step()
    return step


def _peak(name: str, rows_per_unit: int | None, tiny: bool) -> int:
    return peak_of(functools.partial(step_of, name, rows_per_unit, tiny=tiny))


def measure(*, rounds: int, memory: bool, tiny: bool, on_step: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return, by model and rows of a unit, the CPU time and the peak of memory over those of ordinary training.

    Steps are taken in turns; times are the least of each.
    """
    found = []
    for name in MODELS:
        steps = {K: step_of(name, K, tiny=tiny) for K in (None, *SIZES)}
        least = dict.fromkeys(steps, float("inf"))
        for _ in range(rounds):
            for K, step in steps.items():
                begun = time.process_time()
                step()
                least[K] = min(least[K], time.process_time() - begun)
        peaks = {K: in_fresh_process(_peak, name, K, tiny) for K in steps} if memory else {}
        for K in SIZES:
            row: dict[str, Any] = {"model": name, "rows_per_unit": K, "ratio": least[K] / least[None]}
            found.append(row | ({"memory_ratio": peaks[K] / peaks[None]} if memory else {}))
            on_step(f"{name}, {K}")
    return found
