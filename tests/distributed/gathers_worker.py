"""Ranks run units of equal shapes under FSDP2; each rank reports, case by case, the errors of its logical batches.

Usage: torchrun --nproc_per_node=2 gathers_worker.py CASE...; each rank reports per case messages, "" for none.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import LogicalBatchError
from tests.distributed.rank import main

N, D = 16, 4
DATA = TensorDataset(torch.randn(N, D, generator=torch.Generator().manual_seed(0)))


class Branches(nn.Module):
    """Branch `a`, or `b` where `turned`."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(D, D) for _ in range(3))
        self.case, self.turned = case, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.b(h) if self.turned else self.a(h)


def sharded(model: Branches) -> Branches:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if model.case == "replicas" else None
    for unit in () if model.case == "one unit" else (model.a, model.b):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if model.case != "units":
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return model


def told(case: str) -> list[str]:
    """Train with the same branches on all ranks, then with others, and then with the same again."""
    torch.manual_seed(0)
    model, messages = sharded(Branches(case)), []
    own = dist.get_rank() // (2 if case == "replicas" else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(model, batch_size=N, sample_size=N, steps=3, noise_multiplier=0.0, verify=False)
        for apart in (False, True, False):
            message = ""
            try:
                for logical_batch in engine.batches(DATA, 2, steps=1):
                    for i, (x,) in enumerate(logical_batch):
                        model.turned = bool((i + own * apart) % 2)
                        model(x).square().mean().backward()
                    engine.privatize()
            except LogicalBatchError as error:
                message = str(error)
            model.zero_grad()
            messages.append(message)
        engine.detach()
    return messages


if __name__ == "__main__":
    main(lambda: [told(case) for case in sys.argv[1:]])
