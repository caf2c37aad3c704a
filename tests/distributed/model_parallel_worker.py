"""One rank of a training whose ranks hold parts of a model, or of its samples; prints what it was told, case by case.

Usage: torchrun --nproc_per_node=2 model_parallel_worker.py CASE...; each rank reports per case [error class, message,
figure], where the figure is how far the parameters have moved, if the training went through.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.errors import DpshardError
from tests.distributed.rank import main

T, D = 4, 8
DATA = TensorDataset(torch.randn(32, T, D, generator=torch.Generator().manual_seed(0)))


def train(model: nn.Module, *, logs: bool = False, saves: bool = False, **settings: Any) -> float:
    """How far two steps on `DATA` move the parameters; `logs`: the loss, as a mean over all ranks."""
    chosen = {"batch_size": 8, "sample_size": 32, "steps": 2, "noise_multiplier": 0.0, **settings}
    engine = PrivacyEngine(model, **chosen)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [local(p).clone() for p in trained]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    if saves:
        Checkpointer("nowhere", engine, optimizer)
    for logical_batch in engine.batches(DATA, 4):
        for (x,) in logical_batch:
            loss = model(x).square().mean((1, 2)).mean()
            if logs:
                dist.all_reduce(loss.detach().clone())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    return max(float((local(p) - x).abs().max()) for p, x in zip(trained, before, strict=True) if len(x))


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def alone() -> dist.ProcessGroup:
    return dist.new_subgroups(group_size=1)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(x))))


# --- tensor parallelism by hand: plain parameters, and all-reduces of the user's own -------------------------------


class SumOverRanks(torch.autograd.Function):
    """Forward all-reduces, backward passes on: what Megatron puts behind a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class TensorParallel(nn.Module):
    """Each rank holds half of the hidden features, and all of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(SumOverRanks.apply(self.down(torch.tanh(self.up(x)))))  # type: ignore[arg-type]


def tensor_parallel_by_hand(how: str) -> float:
    model = TensorParallel()
    if how == "ddp":
        return train(DistributedDataParallel(model, process_group=alone()))
    if how == "fsdp2":
        return train(fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]))
    if how == "denied":  # the user says that the other rank trains a model of its own
        return train(DistributedDataParallel(model, process_group=alone()), model_parallel_group=alone())
    groups = {"alone": None, "world": dist.group.WORLD, "number": 1}
    return train(model, model_parallel_group=groups[how])


# --- torch's own tensor parallelism ---------------------------------------------------------------------------------


def parallelized(how: str) -> float:
    """`how`: which parameters are trained, under FSDP2 over the other dimension of the mesh, or without any."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, ParallelStyle] = {
        "up": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "down": RowwiseParallel(input_layouts=Shard(1)),
    }
    model = nn.Sequential(parallelize_module(Net(), mesh["tp"], plan), nn.Linear(D, D))
    for name, p in model.named_parameters():
        p.requires_grad_({"norms": "norm", "biases": "down.bias", "head": "1."}.get(how, "") in name)
    if how != "head":
        fully_shard(model, mesh=mesh["dp"])
    return train(model)


# --- context parallelism: each rank has a part of the sequence ------------------------------------------------------


class GatherSequence(torch.autograd.Function):
    """Keys and values of all ranks, along the sequence; backward gives each rank the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        g = gradients[0].contiguous()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), 1)[dist.get_rank()]


GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: GatherSequence.apply(x),  # type: ignore[dict-item]
    "nn": lambda x: torch.cat(differentiable.all_gather(x.contiguous()), 1),
    "functional": lambda x: functional.all_gather_tensor_autograd(x.contiguous(), 1, dist.group.WORLD),
    "torch": lambda x: x,
    "none": lambda x: x,
}


class Attention(nn.Module):
    def __init__(self, gather: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.gather = GATHERS[gather]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (2, -1)) for f in (self.q, self.k, self.v))
        k, v = self.gather(k), self.gather(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(y.transpose(1, 2).flatten(2))


def context_by_hand(how: str) -> float:
    backend, _, gather = how.partition("-")
    model = Attention(gather)
    wrapped = DistributedDataParallel(model) if backend == "ddp" else fully_shard(model)
    if gather == "torch":
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=[torch.zeros(1, 2 * T)], buffer_seq_dims=[1]):
            return train(wrapped)
    return train(wrapped)


# --- other parts ----------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Rows go to the rank that holds their expert, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        there = functional.all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)
        return functional.all_to_all_single_autograd(self.expert(there), None, None, dist.group.WORLD)


def experts(how: str) -> float:
    if how == "routed":
        return train(DistributedDataParallel(Routed()))
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(0)]))
    return train(fully_shard(model, mesh=mesh, ignored_params={model.up.weight}))


def pipeline(how: str) -> float:
    """A stage of two, which makes its own engine; "denied" is alone in its pipeline, so that no other one waits."""
    model: nn.Module = nn.Linear(D, D)
    if how == "ddp":
        model = DistributedDataParallel(model, process_group=alone())
    group = alone() if how == "denied" else None
    engine = PrivacyEngine(
        model, batch_size=8, sample_size=8, steps=1, noise_multiplier=0.0, model_parallel_group=group
    )
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean())
    try:
        schedule.step(torch.ones(8, D), target=torch.zeros(8, D))
    finally:
        engine.detach()
    return 0.0


class Centred(nn.Module):
    """Subtracts the mean over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        return self.net(x - mean)


def statistics(_: str) -> float:
    return train(DistributedDataParallel(Centred()))


# --- what looks like it, and is not ---------------------------------------------------------------------------------


class Buffered(Net):
    """With a buffer, which DDP sends around in forward, and a barrier, which sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        dist.barrier()
        return super().forward(x * self.scale)


def sharded_by_units() -> nn.Module:
    model = nn.Sequential(Net(), Net())
    for net in model:
        fully_shard(net, reshard_after_forward=True)
    return fully_shard(model)


def honest(how: str) -> float:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    if how == "buffers":
        return train(DistributedDataParallel(Buffered()))
    if how == "units":
        return train(sharded_by_units())
    if how == "frozen":  # a part that is not trained is sharded over less ranks
        model = nn.Sequential(Net(), Net())
        model[0].requires_grad_(False)
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"])
        return train(fully_shard(model))
    if how == "attention":
        return train(fully_shard(Attention("none")))
    if how == "logged":
        return train(DistributedDataParallel(Net()), logs=True)
    # Every rank trains a model of its own, the second one twice: neither waits for the other.
    group = alone()
    own: nn.Module = Net()
    if how == "own-ddp":
        own = DistributedDataParallel(own, process_group=group)
    if how == "own-fsdp2":
        own = fully_shard(own, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("training", "shard"))["shard"])
    return max(train(own, saves=how == "saved", model_parallel_group=group) for _ in range(1 + rank))


CASES: dict[str, Callable[[str], float]] = {
    "tp": tensor_parallel_by_hand,
    "parallelized": parallelized,
    "cp": context_by_hand,
    "experts": experts,
    "pipeline": pipeline,
    "statistics": statistics,
    "honest": honest,
}


def outcome(case: str) -> tuple[str, str, float]:
    kind, _, how = case.partition(":")
    torch.manual_seed(0)
    try:
        return "", "", CASES[kind](how)
    except DpshardError as error:
        return type(error).__name__, str(error), 0.0
    except Exception as error:  # noqa: BLE001  # told, and so not taken for a refusal
        if isinstance(error.__cause__, DpshardError):  # the schedules of torch 2.11 raise their own error from it
            return type(error.__cause__).__name__, str(error.__cause__), 0.0
        return "crash", f"{type(error).__name__}: {error}", 0.0


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
