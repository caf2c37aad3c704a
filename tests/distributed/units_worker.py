"""One step over 7 units of K rows; every rank reports the error of its whole update, case by case.

Usage: torchrun --nproc_per_node=2 units_worker.py CASE...

A case is KIND[+OPTION...]. KIND: ddp, fsdp2, hsdp (replicated, shards of one rank), or zero1, zero2, zero3 (DeepSpeed).
Options: K (3 by default); a clipping style; a clipping mode; automatic (clipping), adaptive (thresholds), checkpoint;
verified. regrouped: a model that regroups rows, on equal rows of two units here and of one there; the report is its
error.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import QuantileTracking
from dpshard.clipping.groups import STYLES
from dpshard.config import CLIPPING_MODES
from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.distributed.update_worker import Model
from tests.networks import sentences
from tests.oracle import clipped_mean, noise_free_engine, norm, relative_error

N, D = 7, 5
Update = dict[str, Tensor]
"""The whole update, by the names of the bare model."""


class Network(Model):
    """Tokens [B, T] to scores [B, V]."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        del self.idle
        self.checkpointed = checkpoints
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


def error(case: str) -> float:
    kind, *options = case.split("+")
    K = next((int(option) for option in options if option.isdigit()), 3)
    style = next((option for option in options if option in STYLES), "all-layer")
    fn = "automatic" if "automatic" in options else "abadi"
    plain = Network()
    named = dict(plain.named_parameters())
    ids, y = (x.unflatten(0, (N, K)) for x in sentences(N * K))
    per_unit = []
    for rows, classes in zip(ids, y, strict=True):
        loss = F.cross_entropy(plain(rows), classes)
        gradients = torch.autograd.grad(loss, list(named.values()))
        per_unit.append(dict(zip(named, gradients, strict=True)))
    R = sorted(norm(g) for g in per_unit)[N // 2] * 0.999
    groups: dict[str, list[str]] = {}
    for name in named:
        groups.setdefault(group_of(name, style), []).append(name)
    settings: dict[str, Any] = {"clipping_style": style, "clipping_fn": fn, "rows_per_unit": K, "max_grad_norm": R}
    settings["clipping_mode"] = next((option for option in options if option in CLIPPING_MODES), "auto")
    settings |= {"batch_size": N, "sample_size": N, "verify": "verified" in options}
    if "adaptive" in options:
        settings["adaptive_clipping"] = QuantileTracking(learning_rate=0.5)
    model = Network(checkpoints="checkpoint" in options)
    run = of_deepspeed if kind.startswith("zero") else of_torch
    data = TensorDataset(ids, y) if K > 1 else TensorDataset(ids[:, 0], y[:, 0])
    found = run(kind, model, data, settings)
    return relative_error(
        found, clipped_mean(per_unit, max_grad_norm=R, batch_size=N, clipping_fn=fn, groups=list(groups.values()))
    )


def group_of(name: str, style: str) -> str:
    if style == "block-wise":
        return name[: len("blocks.0.")] if name.startswith("blocks.") else ""
    return {"all-layer": "", "layer-wise": name.rpartition(".")[0], "param-wise": name}[style]


def of_torch(kind: str, bare: Network, data: TensorDataset, settings: Any) -> Update:
    """The update of DDP, FSDP2 or HSDP."""
    model: nn.Module = bare
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None
        for block in bare.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(bare, mesh=mesh)
    engine = noise_free_engine(model, **settings)
    for logical_batch in engine.batches(data, 2):
        for ids, y in logical_batch:
            F.cross_entropy(model(ids), y).backward()
        engine.privatize()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def of_deepspeed(kind: str, model: Network, data: TensorDataset, settings: Any) -> Update:
    """The update of DeepSpeed, which trains in float32: the step of SGD at learning rate 1."""
    from tests.distributed.deepspeed_setup import configuration, start, whole

    model = model.float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model_engine = start(model, configuration(int(kind[-1])), torch.optim.SGD(model.parameters(), lr=1.0))
    engine = noise_free_engine(model_engine, **settings)
    for logical_batch in engine.batches(data, 2):
        for ids, y in logical_batch:
            model_engine.backward(F.cross_entropy(model_engine(ids), y))
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
