"""One rank of steps without any gradient, so that SGD(lr=1) moves parameters by the noise alone.

Usage: torchrun --nproc_per_node=W noise_worker.py BACKEND FOLDER; rank r leaves FOLDER/r.pt: per parameter its
elements on this rank, one row a step, and the place of the first of them in the whole parameter.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.names import canonical_name
from tests.distributed.rank import main

STEPS, SIGMA, THRESHOLD, BATCH_SIZE = 3, 0.7, 3.0, 6


class Model(nn.Module):
    """Odd sizes, so that shards are uneven, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(150, 201), nn.Linear(201, 151), nn.Linear(99, 101)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def sharded(backend: str) -> nn.Module:
    model, world = Model(), dist.get_world_size()
    if backend in ("ddp", "zero1"):
        return DistributedDataParallel(model)
    shape, names = ((2, world // 2), ("replicate", "shard")) if backend == "hsdp" else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def noises(model: nn.Module, engine: PrivacyEngine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The noise of each parameter, one row a step."""
    steps: dict[str, list[Tensor]] = {}
    for logical_batch in engine.batches(TensorDataset(torch.zeros(engine.mechanism.sample_size, 150)), 2):
        for (x,) in logical_batch:
            (model(x) * 0.0).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # so that the update is not rounded to the parameter's last digit
        optimizer.step()
        for name, p in model.named_parameters():
            steps.setdefault(canonical_name(name).removeprefix("module."), []).append(-local(p).flatten().clone())
        optimizer.zero_grad()
    return {name: torch.stack(rows) for name, rows in steps.items()}


def save(engine: PrivacyEngine, rows: dict[str, Tensor], folder: Path) -> None:
    """Leave the noise of each parameter, and the place of this rank's first element of it."""
    place = engine._backend.sharding.place
    torch.save({name: (place(name).start, noise) for name, noise in rows.items()}, folder / f"{dist.get_rank()}.pt")


def noise() -> None:
    backend, folder = sys.argv[1], Path(sys.argv[2])
    model = sharded(backend)
    engine = PrivacyEngine(
        model, batch_size=BATCH_SIZE, sample_size=12, steps=STEPS, noise_multiplier=SIGMA, max_grad_norm=THRESHOLD
    )
    engine._secret = bytes(range(32))
    if backend == "zero1":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    save(engine, noises(model, engine, optimizer), folder)


if __name__ == "__main__":
    main(noise)
