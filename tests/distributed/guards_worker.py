"""One rank on which a script goes wrong in a way that only several ranks can; prints what it was told, case by case.

Usage: torchrun --nproc_per_node=2 guards_worker.py CASE...; each rank reports per case [error class, message, how far
the parameters have moved].
"""

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.checkpoint import pack
from dpshard.errors import DpshardError
from tests.distributed.rank import main

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.head = nn.Linear(6, 2)
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        return x if self.idle else self.head(x)

    def embed(self, x: Tensor) -> Tensor:
        return x @ self.weight


def engine_of(model: nn.Module, **changes: Any) -> PrivacyEngine:
    settings = {"batch_size": 32, "sample_size": 32, "steps": 3, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return PrivacyEngine(model, **(settings | changes))


@torch.no_grad()
def write(parameters: Iterable[nn.Parameter]) -> None:
    """Write as an update by hand does, without a change of values."""
    for p in parameters:
        p.sub_(p.grad, alpha=0.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "scaled": lambda model: [p.grad.mul_(2) for p in model.parameters()],
    "scaled-data": lambda model: [p.grad.data.mul_(2) for p in model.parameters()],
    "zeroed-unsynced": lambda model: model.zero_grad(),
    "idle-scaled": lambda model: [p.grad.mul_(2) for p in model.head.parameters()],
    "written": lambda model: write(model.parameters()),
    "written-last": lambda model: write(model.parameters()),
    "foreach-last": lambda model: torch._foreach_add_(
        [p.detach().to_local() for p in model.parameters()], [p.grad.to_local() for p in model.parameters()], alpha=-0.1
    ),
}
"""What a script does between two micro-batches, or after the last one."""


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "verified": lambda output: output.sum(1).mean(),
    "verified-mixing": lambda output: (output.sum(1) ** 2).mean().sqrt(),
}
"""What is handed to `engine.verify`: a loss of every sample, and one of all together."""


def train(model: nn.Module, engine: PrivacyEngine, case: str = "") -> None:
    """Two steps with a micro-batch of 8 a rank, so two micro-batches a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    core = model.module if isinstance(model, DistributedDataParallel) else model
    forward = core if case == "past-ddp" else model
    late: Tensor | None = None
    with model.no_sync() if case == "no-sync" else contextlib.nullcontext():  # type: ignore[operator]
        for logical_batch, _ in zip(engine.batches(DATA, 8), range(2), strict=False):
            for i, (x,) in enumerate(logical_batch):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(case != "zeroed-unsynced" or logical_batch.complete)
                core.idle = case == "idle-scaled" and i == 1
                loss = forward(x).sum(1).mean()
                if case == "late":
                    if late is not None:
                        late.backward()
                    late = loss
                else:
                    loss.backward()
                if case in CHANGES and i == case.endswith("-last"):
                    CHANGES[case](core)
            if late is not None:
                late.backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp(case: str, model: Model) -> None:
    idle, static = case == "idle-scaled", case == "static"
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=case == "views", find_unused_parameters=idle, static_graph=static
    )
    if case == "compressed":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    engine = engine_of(wrapped, clipping_style="layer-wise" if idle else "all-layer")
    if case == "fused-optimizer":
        wrapped._register_fused_optim(torch.optim.SGD, lr=1.0)
    with wrapped.join() if case == "join" else contextlib.nullcontext():
        train(wrapped, engine, case)


def fsdp2(case: str, model: Model) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if case.startswith("verified") else None)
    fully_shard(model.head, mp_policy=policy)
    sharded = fully_shard(model, mp_policy=policy)
    if case == "method":
        register_fsdp_forward_method(sharded, "embed")
    engine = engine_of(sharded)
    if case.startswith("verified"):  # before any other forward, and with inputs that FSDP casts
        engine.verify(DATA.tensors[0][:3], loss_fn=LOSSES[case])
    if case == "left-by-unshard":
        sharded.unshard()
    if case in ("left-by-unshard", "method"):
        sharded.embed(DATA.tensors[0]).sum().backward()
        sharded.reshard()
        sharded.zero_grad()
    train(sharded, engine, case)


def fsdp1(_: str, model: Model) -> None:
    engine_of(FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def disagreeing(case: str, model: Model) -> None:
    wrapped, rank = DistributedDataParallel(model), dist.get_rank()
    if case == "sigma":
        engine_of(wrapped, noise_multiplier=1.0 + rank)
    if case == "size":
        engine_of(wrapped, sample_size=32 + rank)
    if case == "state":
        engine = engine_of(wrapped)
        if rank == 1:
            engine._budget.spend(bytes(16), unverified_sampling=False)
        engine.load_state_dict(pack(engine.mechanism, bytes(32), engine._budget.state_dict()))


def outcome(case: str) -> tuple[str, str, float]:
    kind, _, what = case.partition(":")
    torch.manual_seed(0)
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    told = ("", "")
    try:
        {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "ranks": disagreeing}[kind](what, model)
    except DpshardError as error:
        told = (type(error).__name__, str(error))
    moved = 0.0
    if not kind.startswith("fsdp"):
        moved = max(float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters())
    return *told, moved


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
