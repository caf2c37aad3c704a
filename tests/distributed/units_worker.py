"""One step over 7 units of 3 rows; every rank reports the error of its whole update, case by case.

Usage: torchrun --nproc_per_node=2 units_worker.py CASE...

A case is ddp, fsdp2, hsdp (replicated, shards of one rank), or the ZeRO stage of DeepSpeed: zero1, zero2, zero3.
regrouped: a model that regroups rows, on equal rows of two units here and of one there; the report is its error.
"""

import sys
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.oracle import clipped_mean, noise_free_engine, norm, ramp_loss, relative_error

N, K, D = 7, 3, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)).double()


def error(case: str) -> float:
    data = torch.randn(N, K, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = network()
    names = [name for name, _ in plain.named_parameters()]
    per_unit = [
        dict(zip(names, torch.autograd.grad(ramp_loss(plain(unit)), list(plain.parameters())), strict=True))
        for unit in data
    ]
    R = sorted(norm(g) for g in per_unit)[N // 2] * 0.999
    found = of_deepspeed(int(case[-1]), data, R) if case.startswith("zero") else of_torch(case, data, R)
    return relative_error(found, clipped_mean(per_unit, max_grad_norm=R, batch_size=N))


def of_torch(case: str, data: Tensor, R: float) -> Mapping[str, Tensor]:
    """The update of DDP, FSDP2 or HSDP."""
    model: nn.Module = network()
    if case == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if case == "hsdp" else None
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    engine = noise_free_engine(model, batch_size=N, sample_size=N, max_grad_norm=R, rows_per_unit=K)
    for logical_batch in engine.batches(TensorDataset(data), 2):
        for (x,) in logical_batch:
            ramp_loss(model(x)).backward()
        engine.privatize()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def of_deepspeed(stage: int, data: Tensor, R: float) -> Mapping[str, Tensor]:
    """The update of DeepSpeed, which trains in float32: the step of SGD at learning rate 1."""
    from tests.distributed.deepspeed_setup import configuration, start, whole

    model = network().float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model_engine = start(model, configuration(stage), torch.optim.SGD(model.parameters(), lr=1.0))
    engine = noise_free_engine(model_engine, batch_size=N, sample_size=N, max_grad_norm=R, rows_per_unit=K)
    for logical_batch in engine.batches(TensorDataset(data.float()), 2):
        for (x,) in logical_batch:
            model_engine.backward(ramp_loss(model_engine(x)))
        model_engine.step()
    return {name: (before[name] - p).double() for name, p in whole(model).items()}


class Regroups(nn.Module):
    """First rows of all units, then second ones, within the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.first(torch.cat([x[0::2], x[1::2]])).tanh())
        return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def of_regrouped() -> str | float:
    torch.manual_seed(1)
    data = torch.randn(3, 1, D, dtype=torch.float64).expand(3, 2, D).contiguous()
    y = torch.tensor([[0, 1], [2, 0], [1, 2]])
    plain = Regroups()
    names = [name for name, _ in plain.named_parameters()]
    per_unit = [
        dict(zip(names, torch.autograd.grad(F.cross_entropy(plain(x), k), list(plain.parameters())), strict=True))
        for x, k in zip(data, y, strict=True)
    ]
    R = sorted(norm(g) for g in per_unit)[1] * 0.999
    model = DistributedDataParallel(Regroups())
    engine = noise_free_engine(model, batch_size=3, sample_size=3, max_grad_norm=R, rows_per_unit=2)
    try:
        for logical_batch in engine.batches(TensorDataset(data, y), 2):
            for x, k in logical_batch:
                F.cross_entropy(model(x), k).backward()
            engine.privatize()
    except DpshardError as refusal:
        return type(refusal).__name__
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return relative_error(found, clipped_mean(per_unit, max_grad_norm=R, batch_size=3))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(lambda: [of_regrouped() if case == "regrouped" else error(case) for case in sys.argv[1:]])
