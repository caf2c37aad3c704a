"""The cost of drawing a logical batch, and the time that training waits for it."""

from __future__ import annotations

import time
import tracemalloc
import warnings
from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.workloads import Workload, loss
from dpshard import PrivacyEngine
from dpshard.applications.benchmark import interleave
from dpshard.config import BatchSchedule
from dpshard.sampling import PoissonSampler, plan_micro_batches

SIZES = ((50_000, 1_024), (10_000_000, 65_536), (346_000_000, 65_536), (346_000_000, 2_097_152))
"""Samples of a data set, and of a logical batch. DP-BERT has 346 million: Anil et al. 2021, arXiv:2108.01624."""
MICRO_BATCHES = 8
"""Micro-batches of a logical batch in `waiting`."""


def draws(sizes: Iterable[tuple[int, int]] = SIZES, *, micro_batch_size: int = 64, steps: int = 3) -> list[Any]:
    """Return the seconds to draw a logical batch and plan its micro-batches, and the peak of bytes."""
    found = []
    for sample_size, batch_size in sizes:
        plan = partial(_plan, PoissonSampler(sample_size, BatchSchedule((batch_size,)), bytes(32)), micro_batch_size)
        seconds = median(interleave({"plan": plan}, rounds=steps)["plan"])
        tracemalloc.start()
        plan()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sizes_and_costs = {"sample_size": sample_size, "batch_size": batch_size}
        found.append(sizes_and_costs | {"seconds": seconds, "peak_bytes": peak_bytes})
    return found


def _plan(sampler: PoissonSampler, micro_batch_size: int) -> None:
    plan_micro_batches(sampler.draw(0), 0, micro_batch_size)


def waiting(workload: Workload, *, steps: int, device: str) -> dict[str, float]:
    """Return the seconds of a private step of several micro-batches, and the part in which it waits for data."""
    x, y = (part.to(device) for part in workload.data(2 * MICRO_BATCHES * workload.batch))
    model = workload.build().to(device).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(
            model, batch_size=MICRO_BATCHES * workload.batch, sample_size=len(x), steps=steps + 1, noise_multiplier=1.0
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    waits, whole = [], []
    batches = iter(engine.batches(TensorDataset(x, y), workload.batch))
    while engine.step < engine.steps:
        begun = time.perf_counter()
        logical_batch = next(batches)
        waited = time.perf_counter() - begun
        rows = iter(logical_batch)
        while not logical_batch.complete:
            asked = time.perf_counter()
            x_B, y_B = next(rows)
            waited += time.perf_counter() - asked
            loss(model(x_B), y_B).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole.append(time.perf_counter() - begun)
        waits.append(waited)
    return {"seconds": median(whole[1:]), "waiting": median(waits[1:])}  # the first one verifies the model
