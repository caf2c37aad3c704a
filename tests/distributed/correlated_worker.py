"""One rank of steps without any gradient under correlated noise, so that SGD(lr=1) moves parameters by the noise alone.

Usage: torchrun --nproc_per_node=W correlated_worker.py noise BACKEND FOLDER; of each of RUNS, rank r leaves
FOLDER/RUN/r.pt: per parameter its elements on this rank, one row a step, and the place of the first of them in the
whole parameter.
Or: correlated_worker.py memory: the most bytes that torch and numpy held while the last step got its noise, for one
vector and for MANY.
"""

import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from dpshard import BandedInverse, BandMF, PrivacyEngine
from dpshard.noise.keyed import KeyedGaussian
from tests.distributed.noise_worker import local, noises, save, sharded
from tests.distributed.rank import main

STEPS, SIGMA, THRESHOLD, BATCH_SIZE, BANDS, SAMPLES = 8, 0.7, 3.0, 6, 4, 18
MANY = 16
SECRET = bytes(range(32))
RUNS: dict[str, dict[str, Any]] = {
    "banded-inverse": {"sampling": "fixed-order", "noise_correlation": BandedInverse(bands=BANDS)},
    "buffered": {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=3, buffers=True)},
}


def engine_of(model: nn.Module, run: dict[str, Any], steps: int) -> PrivacyEngine:
    engine = PrivacyEngine(
        model,
        batch_size=BATCH_SIZE,
        sample_size=SAMPLES,
        steps=steps,
        noise_multiplier=SIGMA,
        max_grad_norm=THRESHOLD,
        verify=False,
        **run,
    )
    engine._secret = SECRET
    return engine


def noises_of_run(model: nn.Module, run: str) -> tuple[PrivacyEngine, dict[str, Tensor]]:
    """The engine, and the noise of each parameter, one row a step."""
    engine = engine_of(model, RUNS[run], STEPS)
    return engine, noises(model, engine, torch.optim.SGD(model.parameters(), lr=1.0))


def noise() -> None:
    backend, folder = sys.argv[2], Path(sys.argv[3])
    for run in RUNS:
        (folder / run).mkdir(exist_ok=True)
        engine, rows = noises_of_run(sharded(backend), run)
        save(engine, rows, folder / run)


class _Live(TorchDispatchMode):
    """The most bytes of storages that were made in this block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is Tensor and (key := x.untyped_storage()._cdata) not in self._known:
                size = x.untyped_storage().nbytes()
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(x.untyped_storage(), self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def memory() -> list[dict[str, int]]:
    """That of MANY vectors comes first, with what is made at first use."""
    return [_memory(bands) for bands in (MANY, 1)][::-1]


def _memory(bands: int) -> dict[str, int]:
    """Only the last of MANY steps draws noise; it has as many vectors as bands."""
    steps = MANY
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1, bias=False))
    fully_shard(model[0])
    model = fully_shard(model)
    correlation = None if bands == 1 else BandedInverse(bands=bands)
    engine = engine_of(model, {"sampling": "fixed-order", "noise_correlation": correlation}, steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    release_ = KeyedGaussian.release_
    KeyedGaussian.release_ = lambda self, shards, *, step, std, divisor=1.0: release_(
        self, shards, step=step, std=std if step == steps - 1 else 0.0, divisor=divisor
    )
    for batch in engine.batches(TensorDataset(torch.zeros(SAMPLES, 1024)), 3):
        for (x,) in batch:
            (model(x) * 0.0).sum().backward()
        if batch.step == steps - 1:
            tracemalloc.start()
            with _Live() as live:
                engine.privatize()
            numpy = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        optimizer.step()
        optimizer.zero_grad()
    KeyedGaussian.release_ = release_
    engine.detach()
    shard = sum(local(p).numel() * 4 for p in model.parameters())
    return {"peak": numpy + live.most, "shard": shard, "vectors": len(engine.mechanism.noise_weights(steps - 1))}


if __name__ == "__main__":
    main(noise if sys.argv[1] == "noise" else memory)
