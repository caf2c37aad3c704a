"""Rank 1 leaves a micro-batch out, or nothing; every rank reports [message, releases] case by case.

Usage: torchrun --nproc_per_node=2 loops_worker.py CASE...
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import LogicalBatchError
from tests.distributed.rank import main


def step(model: nn.Module, engine: PrivacyEngine, case: str, data: TensorDataset) -> None:
    """Two logical batches of three micro-batches a rank; in the case "padding" the last one of rank 1 is padding."""
    optimizer, here = torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank() == 1
    for logical_batch in engine.batches(data, 2):
        for k, (x,) in enumerate(logical_batch):
            leave_out = here and k == 0
            if case in ("skip", "replay") and leave_out:
                continue
            if case == "one-of-two":
                losses = [model(x).square().sum(1).mean(), model(x + 1).square().sum(1).mean()]
                (losses[0] if leave_out else sum(losses)).backward()  # type: ignore[union-attr]
                continue
            loss = model(x).square().sum(1).mean()
            if case == "no-backward" and leave_out:
                continue
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def outcome(case: str) -> tuple[str, int]:
    backend, _, case = case.partition(":")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if backend == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    size = 9 if case == "padding" else 12
    data = TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(0)))
    engine = PrivacyEngine(model, batch_size=size, sample_size=size, steps=2, noise_multiplier=1.0)
    try:
        step(model, engine, case, data)
    except LogicalBatchError as error:
        if case != "replay":
            return str(error), engine.step
        step(model, engine, "", data)
    return "", engine.step


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
