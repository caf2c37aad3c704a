"""One rank of scripts with two kinds of parallelism that the engine refuses together; prints what each was told.

Usage: torchrun --nproc_per_node=W pairs_worker.py KIND+KIND ...

Kinds: ddp; zero1, zero2 and zero3 (DeepSpeed's); fsdp2; hsdp; tp and sp (by parallelize_module, but declared under
DeepSpeed, which takes no DTensors); cp, pp and ep (declared). Two ranks hold one model. An empty message: nothing was
refused.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dpshard import PrivacyEngine
from dpshard.errors import DpshardError
from tests.distributed.rank import main

D = 8
ZERO = {"zero1", "zero2", "zero3"}
REST = {"cp": "sum", "pp": "stage", "ep": "samples", "tp": "same", "sp": "same"}
"""What is declared of all parameters that only one of two kinds cuts."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.expert = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.down(self.norm(torch.tanh(self.up(x)))))


def parallelized(model: nn.Module, mesh: DeviceMesh, kinds: set[str]) -> None:
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if "sp" in kinds:
        plan = {
            "up": ColwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "down": RowwiseParallel(input_layouts=Shard(1)),
        }
    parallelize_module(model, mesh, plan)


def wrapped(model: nn.Module, mesh: DeviceMesh, kinds: set[str]) -> nn.Module:
    """`model` under the wrappers of the ranks with samples of their own, the inner one first."""
    if "fsdp2" in kinds:
        fully_shard(model, mesh=mesh["shard"])
    if "hsdp" in kinds:
        fully_shard(model, mesh=mesh["replicate", "shard"])
    if "ddp" in kinds:
        model = DistributedDataParallel(model, process_group=mesh["replicate"].get_group())
    for kind in kinds:
        if kind.startswith("zero"):
            from tests.distributed.deepspeed_setup import configuration, start

            model = start(model, configuration(int(kind[-1])), torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def told(kinds: set[str], mesh: DeviceMesh) -> dict[str, Any]:
    placed = kinds & {"tp", "sp"} and not kinds & ZERO
    rest = [REST[kind] for kind in ("pp", "ep", "cp", "tp", "sp") if kind in kinds]
    if not rest or (placed and kinds <= {"tp", "sp", "ddp", "fsdp2", "hsdp"}):
        return {}
    parts: dict[str, Any] = {"*": rest[0]}
    if "ep" in kinds:
        parts = {"expert.*": 0, **parts}
    if kinds & {"tp", "sp"} or len(rest) > 1:
        parts = {"up.*": 0 if kinds & {"tp", "sp"} else rest[-1], **parts}
    return {"model_parallel_group": mesh["model"].get_group(), "model_parallel_parts": parts}


def outcome(case: str) -> str:
    kinds, world = set(case.split("+")), dist.get_world_size()
    apart = 2 if kinds & {"tp", "sp", "cp", "pp", "ep"} else 1
    shards = world // apart if "fsdp2" in kinds and "ddp" not in kinds else 1
    mesh = init_device_mesh(
        "cpu", (world // apart // shards, shards, apart), mesh_dim_names=("replicate", "shard", "model")
    )
    torch.manual_seed(0)
    model: nn.Module = Net()
    try:
        if kinds & {"tp", "sp"} and not kinds & ZERO:
            parallelized(model, mesh["model"], kinds)
        model = wrapped(model, mesh, kinds)
        PrivacyEngine(model, batch_size=8, sample_size=32, steps=2, noise_multiplier=1.0, **told(kinds, mesh)).detach()
    except (DpshardError, RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
