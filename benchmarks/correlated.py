"""Correlated noise: its time by the number of vectors, and whether it pays on small data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard import BandedInverse, BandMF, PrivacyEngine
from dpshard.accounting import SampledMechanism, calibrate
from dpshard.accounting.mechanism import independent_error
from dpshard.config import BatchSchedule
from dpshard.noise.buffers import BufferedGaussian, NoiseBuffers
from dpshard.noise.keyed import CorrelatedGaussian, Shard, Vector

VECTORS = (1, 2, 4, 8, 16, 64)
ELEMENTS = 2**22
BATCH_SIZE, DELTA = 64, 1e-4
RATES = (0.5, 2.0, 8.0)
"""Learning rates; each mechanism takes its best one, by the mean of all seeds."""


def seconds(elements: int = ELEMENTS, *, rounds: int = 3) -> list[dict[str, Any]]:
    """Return nanoseconds of CPU time per element of a release with p vectors, float32, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shards, found = [Shard("w", torch.zeros(elements))], []
        for p in VECTORS:
            vectors = tuple(Vector(1.0 / (j + 1), bytes([j] * 32), j) for j in range(p))
            release = partial(CorrelatedGaussian(bytes(32), vectors=vectors).release_, shards)
            times = []
            for _ in range(rounds):
                start = time.process_time()
                release(step=0, std=1.0, divisor=2.0)
                times.append(time.process_time() - start)
            found.append({"vectors": p, "ns": 1e9 * min(times) / elements})
    finally:
        torch.set_num_threads(threads)
    return found


def of_buffers(elements: int = ELEMENTS, *, bands: tuple[int, ...] = (4, 16, 32), rounds: int = 5) -> list[Any]:
    """Return nanoseconds of CPU time per element of a release from b - 1 buffers, float32, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shards, found = [Shard("w", torch.zeros(elements))], []
        for b in bands:
            buffers = NoiseBuffers(BandMF(bands=b).strategy(2 * b)[:b].tolist())
            links = tuple(bytes([step] * 32) for step in range(b + rounds))
            buffers.of_step(shards, links[:b], secure=False)  # from here on all bands count
            times = []
            for step in range(b, b + rounds):
                start = time.process_time()
                noise = BufferedGaussian(links[step], links=links[: step + 1], buffers=buffers)
                noise.release_(shards, step=step, std=1.0, divisor=2.0)
                times.append(time.process_time() - start)
            found.append({"bands": b, "ns": 1e9 * min(times) / elements})
    finally:
        torch.set_num_threads(threads)
    return found


def candidates(samples: int, steps: int, epochs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield DP-SGD, and correlated mechanisms with a few numbers of bands."""
    yield "poisson", {}
    for p in (4, 16):
        yield f"BISR p={p}", {"sampling": "fixed-order", "noise_correlation": BandedInverse(bands=p)}
    bands = min(4, samples // BATCH_SIZE, steps)
    yield f"BandMF b={bands}", {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=bands)}


def training(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epsilons: tuple[float, ...] = (1, 3, 8),
    epochs: tuple[int, ...] = (1, 4),
    seeds: int = 5,
) -> Iterator[dict[str, Any]]:
    """Yield accuracy on `test` (mean and deviation over seeds) of a linear model, by epsilon, epochs and mechanism."""
    samples = len(train[0])
    for epsilon, passes in product(epsilons, epochs):
        steps = max(1, round(passes * samples / BATCH_SIZE))
        schedule = BatchSchedule((BATCH_SIZE,) * steps)
        plain: float | None = None
        for name, how in candidates(samples, steps, passes):
            run = SampledMechanism(schedule=schedule, sample_size=samples, **how)
            run = calibrate(run, target_epsilon=epsilon, target_delta=DELTA)
            error = independent_error(run.noise_multiplier, steps) if plain is None else run.error
            plain = error if plain is None else plain
            scores = {rate: [_accuracy(train, test, run, rate, seed) for seed in range(seeds)] for rate in RATES}
            rate = max(scores, key=lambda rate: mean(scores[rate]))
            found = {"mean": mean(scores[rate]), "stdev": stdev(scores[rate]) if seeds > 1 else 0.0}
            about = {"epsilon": epsilon, "epochs": passes, "mechanism": name, "sigma": run.noise_multiplier}
            yield about | {"rmse": error / plain, "learning_rate": rate, "accuracy": found}


def _accuracy(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], run: SampledMechanism, rate: float, seed: int
) -> float:
    torch.manual_seed(seed)
    model = nn.Linear(train[0].shape[1], 10)
    nn.init.zeros_(model.weight)
    engine = PrivacyEngine(
        model,
        batch_size=BATCH_SIZE,
        sample_size=run.sample_size,
        steps=run.schedule.steps,
        noise_multiplier=run.noise_multiplier,
        target_delta=DELTA,
        sampling=run.sampling,
        noise_correlation=run.noise_correlation,
        verify=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in engine.batches(TensorDataset(*train), None):
        for x, y in batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return 8x8 digits of scikit-learn, scaled to [0, 1]: 1,437 to train on, 360 to test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])
