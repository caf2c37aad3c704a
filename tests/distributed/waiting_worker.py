"""One step whose ranks reach the clipping groups in other orders; every rank reports the error of its whole update.

Usage: torchrun --nproc_per_node=2 waiting_worker.py BACKEND:BYTES...

Backends: ddp, fsdp2, fsdp2-unused. BYTES of clipped sums and of records may wait for an anchor. Rank 0 runs the
branches of a block from the first to the last, rank 1 from the last to the first. No gradient reaches the branches of
the second block on rank 1, except under fsdp2: they reach their anchor in part, or not at all. The case "again" lets an
anchor run for two forwards in one backward, which FSDP2 would reduce once.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpshard.clipping import scheme
from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.oracle import (
    clipped_mean,
    gradients_of,
    noise_free_engine,
    norm,
    per_sample_gradients,
    ramp_loss,
    relative_error,
)

B, D, BRANCHES = 3, 6, 5


class Block(nn.Module):
    """The sum of branches, from the first to the last or the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(D, D) for _ in range(BRANCHES))
        self.wide = nn.Linear(D, 3 * D)
        self.backwards = self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.branches)
        for layer in reversed(layers) if self.backwards else layers:
            branch = layer(x).tanh()
            x = x + (branch.detach() if self.idle else branch)
        return x + self.wide(x).view(-1, 3, D).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


def again() -> float:
    """The rest of a first forward, and a second one, in one backward."""
    model, x = Towers().double(), torch.randn(B, D, dtype=torch.float64)
    fully_shard(model, reshard_after_forward=False)
    noise_free_engine(model, batch_size=B, clipping_style="layer-wise", max_grad_norm=1.0, verify=False)
    one, two = model(x)
    ramp_loss(one).backward()
    torch.stack([ramp_loss(output) for output in (two, *model(x))]).sum().backward()
    return 0.0


def told(case: str) -> float | str:
    """Return the error of the update, or the message of a refusal."""
    try:
        return again() if case == "again" else error(case)
    except DpshardError as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def error(case: str) -> float:
    backend, nbytes = case.split(":")
    scheme.WAITING["cpu"] = int(nbytes)
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(W * B, D, dtype=torch.float64)
    model = Model().double()
    per_sample = []
    for r in range(W):
        set_rank(model, r, backend)
        per_sample += per_sample_gradients(model, (x[r * B : (r + 1) * B],))
    names = [name for name, _ in model.named_parameters()]
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    R = sorted(norm(g) for g in per_sample)[W * B // 2]
    expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=W * B, groups=groups)
    set_rank(model, rank, backend)
    return relative_error(update(model, backend, x[rank * B :][:B], R), expected)


def set_rank(model: Model, rank: int, backend: str) -> None:
    model.first.backwards = model.second.backwards = rank == 1
    model.second.idle = rank == 1 and backend != "fsdp2"


def update(model: Model, backend: str, x: Tensor, R: float) -> dict[str, Tensor]:
    trained: nn.Module = model
    if backend == "ddp":
        trained = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for block in (model.first, model.second):
            fully_shard(block)
        fully_shard(model)
        if backend == "fsdp2-unused":
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    options = {"clipping_style": "layer-wise", "max_grad_norm": R, "verify": False}
    engine = noise_free_engine(trained, batch_size=len(x) * dist.get_world_size(), **options)
    ramp_loss(trained(x)).backward()
    engine.privatize()
    found = gradients_of(trained)
    engine.detach()
    return {name.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


if __name__ == "__main__":
    main(lambda: [told(case) for case in sys.argv[1:]])
