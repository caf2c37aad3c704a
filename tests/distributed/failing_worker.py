"""Rank 1 fails in the middle of a logical batch while the others wait for it.

Usage: torchrun failing_worker.py leak|course
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.backends import collectives
from tests.distributed.rank import main


class Winding(nn.Linear):
    """Uses its bias in other ways as well, in some of the forwards."""

    course = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.course == 1:
            x = x + self.bias
        if self.course == 2:
            x = x * self.bias
        return super().forward(x)


def fail() -> None:
    how = sys.argv[1]
    collectives.PATIENCE = 5.0
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = fully_shard(Winding(4, 4), mesh=mesh)
    engine = PrivacyEngine(model, batch_size=8, sample_size=16, steps=100, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for logical_batch in engine.batches(TensorDataset(torch.ones(16, 4)), 2):
        for (x,) in logical_batch:
            if how == "leak" and logical_batch.step == 2 and dist.get_rank() == 1:
                model.weight.sum().backward()  # a gradient that nobody clips
            if how == "course":  # from step 1 on both ranks take a new one, at step 3 rank 1 alone
                model.course = 2 if logical_batch.step == 3 and dist.get_rank() == 1 else min(logical_batch.step, 1)
            model(x).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(fail)
