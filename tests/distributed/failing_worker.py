"""Rank 1 fails in the middle of a logical batch while the others wait for it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from tests.distributed.rank import main


def fail() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    engine = PrivacyEngine(model, batch_size=8, sample_size=16, steps=100, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for logical_batch in engine.batches(TensorDataset(torch.ones(16, 4)), 2):
        for (x,) in logical_batch:
            if logical_batch.step == 2 and dist.get_rank() == 1:
                model.weight.sum().backward()  # a gradient that nobody clips
            model(x).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(fail)
