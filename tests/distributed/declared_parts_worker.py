"""One rank of trainings with declared parts, each compared with one process; prints JSON.

Usage: torchrun --nproc_per_node=W declared_parts_worker.py KIND:WRAPPER:STYLE:MODE[+OPTION...] [...]

Kinds: tp (column- and row-wise maps by hand, with all-reduces of their own), cp (parts of the sequence: attention
gathers keys and values), ring (the same, by torch's context_parallel). Wrappers: alone (all ranks hold one model), ddp,
fsdp2 and hsdp (two ranks hold one model; hsdp shards over half of the others), flat (so they do, but FSDP2 shards over
all ranks), hflat (flat, with replicas), replicas (HSDP whose replicas are ranks of one model). Options: verified,
undeclared, own (a loop that feeds its own batches), forgotten (backward in front of column-wise maps reduces nothing),
lied (terms are declared whole), foreign (torch's ring has other ranks than the declared ones), digested, uncounted (the
norm of one slice), saved (a checkpoint after the first step goes on under FSDP2, with whole samples).
"""

import math
import shutil
import sys
import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.backends.model_parts import ModelParts
from dpshard.errors import DpshardError
from tests import seeds
from tests.distributed.rank import alone, main
from tests.distributed.ring import ring
from tests.sums import taken_for_equal

T, D, H = 8, 4, 8
SECRET = bytes(range(32))
SAMPLES, STEPS = 24, 2
COLUMNS = {"*.up.weight": 0, "*.up.bias": 0, "*.down.weight": 1, "*": "same"}


class Into(torch.autograd.Function):
    """In front of column-wise maps: backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g = gradients[0].clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class OutOf(torch.autograd.Function):
    """Behind row-wise maps: forward sums the ranks' outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Gathered(torch.autograd.Function):
    """The whole sequence; backward gives each rank the gradients of its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g = gradients[0].contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g.chunk(ctx.group.size(), 1)[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    """`group`: the ranks that hold its parts, or parts of the sequence; None for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D, bias=False)
        self.kind: str = ""
        self.group: Any = None
        self.forgets: bool = False
        self.causal: bool = False

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.causal:
            x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None], is_causal=True)[:, 0]
            return x + self.down(torch.tanh(self.up(self.norm(x))))
        if self.kind == "cp":
            k = Gathered.apply(k, self.group)
        x = x + (q @ k.mT).softmax(2) @ k
        y = self.norm(x)
        if self.kind == "tp" and not self.forgets:
            y = Into.apply(y, self.group)
        y = self.down(torch.tanh(self.up(y)))
        return x + (OutOf.apply(y, self.group) if self.kind == "tp" else y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cut(model: Model, kind: str, group: Any, *, forgets: bool) -> None:
    """Make `model` this rank's parts."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.kind, block.group, block.forgets = kind, group, forgets
        if kind == "tp":
            for owner, name, dim in ((block.up, "weight", 0), (block.up, "bias", 0), (block.down, "weight", 1)):
                part = getattr(owner, name).detach().chunk(group.size(), dim)[dist.get_rank(group)]
                setattr(owner, name, nn.Parameter(part.clone()))


def train(
    model: nn.Module,
    kind: str,
    style: str,
    mode: str,
    options: set[str],
    group: Any = None,
    folder: str = "",
    until: int = STEPS,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(SAMPLES, T, D, generator=generator, dtype=torch.float64))
    parts = COLUMNS if kind == "tp" else {"*": "same" if "lied" in options else "sum"}
    declared = {"model_parallel_group": group, "model_parallel_parts": parts}
    if group is None or "undeclared" in options:
        declared = {}
    engine = PrivacyEngine(
        model,
        batch_size=8,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=0.3,
        max_grad_norm=2.0,
        clipping_fn="abadi",
        clipping_style=style,
        clipping_mode=mode,
        accountant="gdp",
        verify="verified" in options,
        **declared,
    )
    seeds.give_secret(engine, SECRET)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = Checkpointer(folder, engine, optimizer) if folder else None
    if checkpointer is not None:
        checkpointer.load()
    batches = [[dataset[:4]]] if "own" in options else engine.batches(dataset, 3 if kind == "tp" else 1)
    for logical_batch in batches:
        for (x,) in logical_batch:
            if kind == "cp" and group is not None:
                x = x.chunk(group.size(), 1)[dist.get_rank(group)]
            around = dist.group.WORLD if "foreign" in options else group
            with ring(around, x) if kind == "ring" and group is not None else nullcontext():
                model(x).square().sum((1, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.save()
        if engine.step == until:
            break
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics()}


def resumed(
    first: nn.Module, kind: str, style: str, mode: str, options: set[str], group: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and figures after a step as declared, and the rest from a checkpoint under FSDP2, on whole samples."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    torch.manual_seed(1)  # other parameters: those of the checkpoint count
    second = Model().double()
    for block in (*second.blocks, second):
        fully_shard(block)
    try:
        train(first, kind, style, mode, options, group, shared[0], until=1)
        return second, train(second, kind, style, mode, options, None, shared[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(shared[0])


def joined(model: nn.Module, kind: str, group: Any) -> dict[str, Tensor]:
    core = model.module if isinstance(model, DistributedDataParallel) else model
    found = {}
    for name, p in core.named_parameters():
        part = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join(name.split(".")[-2:]))
        if kind == "tp" and dim is not None:
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            part = torch.cat(parts, dim)
        found[name] = part
    return found


@alone
def train_alone(kind: str, style: str, mode: str) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it begins and ends with."""
    model = begun(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    figures = train(model, kind, style, mode, set())
    return {**figures, "before": before, "trained": {name: p.detach() for name, p in model.named_parameters()}}


def begun(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    for block in model.blocks:
        block.causal = kind == "ring"  # pyright: ignore
    return model


def compare(case: str) -> dict[str, Any]:
    seeds.fix(case)
    kind, wrapper, style, mode = case.split(":")
    mode, *chosen = mode.split("+")
    options = set(chosen)
    parted = begun(kind)
    world = dist.get_world_size()
    shape, names = (1, world) if wrapper == "alone" else (world // 2, 2), ("data", "model")
    if wrapper in ("hsdp", "hflat"):
        shape, names = (2, world // 4, 2), ("replicate", "shard", "model")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    group = mesh["model"].get_group()
    cut(parted, kind, group, forgets="forgotten" in options)
    model: nn.Module = parted
    if wrapper == "ddp":
        model = DistributedDataParallel(parted, process_group=mesh["data"].get_group())
    elif wrapper in ("fsdp2", "hsdp", "flat", "hflat", "replicas"):
        over = mesh._flatten("all") if wrapper == "flat" else mesh[names[:-1]]
        if wrapper == "hflat":
            over = DeviceMesh._concatenate([mesh["replicate"], mesh["shard", "model"]._flatten("shards")])
        elif wrapper == "replicas":
            over = DeviceMesh("cpu", mesh.mesh.t(), mesh_dim_names=("model", "data"))
        for block in parted.blocks:
            fully_shard(block, mesh=over)
        fully_shard(parted, mesh=over)
    uncounted = mock.patch.object(ModelParts, "adds_squares", ModelParts.is_cut)
    try:
        with (
            nullcontext() if "digested" in options else taken_for_equal(),
            uncounted if "uncounted" in options else nullcontext(),
        ):
            if "saved" in options:
                model, found = resumed(model, kind, style, mode, options, group)
            else:
                found = train(model, kind, style, mode, options, group)
    except DpshardError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    expected = train_alone(kind, style, mode)
    before, trained, parameters = expected["before"], expected["trained"], joined(model, kind, group)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    return {
        "error": max(float((parameters[n] - p).norm() / change) for n, p in trained.items()),
        **{name: [found[name], expected[name]] for name in ("epsilon", "metrics")},
    }


if __name__ == "__main__":
    main(lambda: [compare(case) for case in sys.argv[1:]])
