"""One rank of trainings under tensor parallelism, each compared with the same training in one process; prints JSON.

Usage: torchrun --nproc_per_node=W tensor_parallel_worker.py MESH:STYLE:MODE[+OPTION...] [...]

Meshes: tp (all ranks hold one model), fsdp2 and hsdp (tensor parallelism by two under FSDP2 over the rest; HSDP has
shards on one rank only). Options: plain (norms and head in no plan: whole on every rank), whole (no sequence
parallelism), tracked (adaptive thresholds), correlated and buffered (noise over
steps; see CORRELATED), logits (the head's output stays in parts), loss (so does its loss), tied,
checkpoint, compiled, verified, resumed (a checkpoint after the first step goes on under FSDP2 alone, over all ranks),
started (so does one of FSDP2 on this mesh), strangers (ranks of one model get different samples), digested (the noise
depends on the sums, as in use), retied (tied after FSDP has sharded both tables, as torchtitan does), and the planted
faults of `FAULTS`.
"""

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpshard import BandedInverse, BandMF, Checkpointer, PrivacyEngine, QuantileTracking
from dpshard.backends.model_parts import ModelParts
from dpshard.clipping.tape import Tape
from dpshard.clipping.uses import Use
from dpshard.errors import DpshardError
from dpshard.records import PerSampleGrad, Record
from tests import seeds
from tests.distributed.rank import alone, main
from tests.sums import taken_for_equal

V, D, H, T = 16, 8, 4, 8
SECRET = bytes(range(32))
SAMPLES, STEPS = 24, 2
CORRELATED: dict[str, dict[str, Any]] = {
    "correlated": {"steps": 5, "sampling": "fixed-order", "noise_correlation": BandedInverse(bands=3)},
    "buffered": {"steps": 5, "sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=2, buffers=True)},
}
"""Settings of the engine for noise that is correlated over steps, by option."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // H)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        weights = (q @ k.transpose(-1, -2) + torch.full((T, T), float("-inf"), dtype=q.dtype).triu(1)).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.attention, self.n2, self.mlp = nn.LayerNorm(D), Attention(), nn.RMSNorm(D), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)
        self.checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def parallelize(model: Model, mesh: DeviceMesh, options: set[str]) -> Model:
    """As torchtitan's Llama: activations between blocks are parts of the sequence; see "whole" and "plain"."""
    sequence = not options & {"whole", "plain"}
    between = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=between, use_local_output=not sequence)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence),
    }
    if "plain" not in options:
        plan["head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if options & {"logits", "loss"} else Replicate(),
            use_local_output=not options & {"logits", "loss"},
        )
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"attention.wo": row, "mlp.up": ColwiseParallel(), "mlp.down": row}
        if sequence:
            plan |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
            for part in ("attention", "mlp"):
                plan[part] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(block, mesh, plan)
    if "tied" in options:
        model.head.weight = model.embedding.weight  # each has parts of its own by now
    return model


def distribute(model: Model, backend: str, options: set[str]) -> nn.Module:
    world = dist.get_world_size()
    if backend == "data":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model
    if backend == "tp":
        return parallelize(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), options)
    if backend == "hsdp":
        mesh = init_device_mesh("cpu", (world // 2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        data = mesh["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        data = mesh["dp"]
    parallelize(model, mesh["tp"], options)
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    if "retied" in options:
        model.head.weight = model.embedding.weight
    return model


def train(
    model: nn.Module,
    style: str,
    mode: str,
    micro_batch_size: int,
    options: set[str],
    folder: str = "",
    until: int | None = None,
) -> dict[str, Any]:
    run: dict[str, Any] = next(
        (settings for option, settings in CORRELATED.items() if option in options), {"steps": STEPS}
    )
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(*(torch.randint(0, V, (SAMPLES, T), generator=generator) for _ in range(2)))
    engine = PrivacyEngine(
        model,
        batch_size=10,
        sample_size=SAMPLES,
        noise_multiplier=0.3,
        max_grad_norm=1.1,
        clipping_fn="abadi",
        clipping_style=style,
        clipping_mode=mode,
        accountant="gdp",
        adaptive_clipping=QuantileTracking(learning_rate=0.5, budget_share=0.1) if "tracked" in options else None,
        verify="verified" in options,
        **run,
    )
    seeds.give_secret(engine, SECRET)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, foreach=False)
    checkpointer = Checkpointer(folder, engine, optimizer) if folder else None
    if checkpointer is not None:
        checkpointer.load()
    until = engine.steps if until is None else until
    for logical_batch in engine.batches(dataset, micro_batch_size) if engine.step < until else ():
        for x, y in logical_batch:
            if "strangers" in options and dist.get_rank() == 1:
                x = x.flip(0)
            logits = model(x)
            if "logits" in options:
                logits = logits.full_tensor()
            with loss_parallel() if "loss" in options else nullcontext():
                losses = losses_of(logits, y)
                engine.record_loss(losses)
                losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.save()
        if engine.step == until:
            break
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics()}


def losses_of(logits: Tensor, y: Tensor) -> Tensor:
    """[B]; logits in parts stay so under loss_parallel."""
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    if isinstance(losses, DTensor):
        losses = losses.full_tensor()
    return losses.view(y.shape).mean(1)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}


@contextmanager
def fault(options: set[str]) -> Iterator[None]:
    """Plant a fault of the library; see FAULTS."""
    for name, (target, planted) in FAULTS.items():
        if name in options:
            with mock.patch(target, planted):
                yield
            return
    yield


def _own_part_only(parts: ModelParts, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return cut_B + whole_B


def _whole_counted_by_each(parts: ModelParts, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return parts.over_ranks(cut_B + whole_B)


def _terms_squared(tape: Tape, use: Use, record: Record) -> Record:
    """Square terms before they are added: norms of what SequenceParallel normalises become too small."""
    parts = tape.clipper.roots.parts
    assert parts is not None
    if not use.termwise:
        return record
    term, total = record.per_sample(), parts.summed(record.per_sample())
    squares = parts.summed(term.flatten(1).square().sum(1)).sqrt()
    scale = squares / total.flatten(1).norm(dim=1)
    return PerSampleGrad(total * scale.view(-1, *[1] * (total.dim() - 1)))


FAULTS: dict[str, tuple[str, Any]] = {
    "own-part-only": ("dpshard.backends.model_parts.ModelParts.norm_sq", _own_part_only),
    "whole-counted-by-each": ("dpshard.backends.model_parts.ModelParts.norm_sq", _whole_counted_by_each),
    "terms-squared": ("dpshard.clipping.tape.Tape._summed", _terms_squared),
}


def resumed(
    first: nn.Module, backend: str, style: str, mode: str, options: set[str]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and figures after one step on one mesh, and the rest on another; from a checkpoint in between."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    torch.manual_seed(1)  # other parameters: those of the checkpoint count
    second = distribute(Model().double(), "data" if "resumed" in options else backend, options)
    try:
        train(first, style, mode, 4, options, shared[0], until=1)
        return second, train(second, style, mode, 4, options, shared[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(shared[0])


@alone
def train_alone(style: str, mode: str, options: frozenset[str]) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it begins and ends with."""
    model = begun(options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    figures = train(model, style, mode, 7, set(options))
    return {**figures, "before": before, "trained": {name: p.detach() for name, p in model.named_parameters()}}


def begun(options: Set[str]) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    if "tied" in options:
        model.head.weight = model.embedding.weight
    return model


def compare(case: str) -> dict[str, Any]:
    seeds.fix(case)
    backend, style, mode = case.split(":")
    mode, *chosen = mode.split("+")
    options = set(chosen)
    tied = {"tied"} if options & {"tied", "retied"} else set()
    parted = Model().double()
    parted.load_state_dict(begun(tied).state_dict())
    parted.checkpointed = "checkpoint" in options
    if "compiled" in options:
        parted.blocks[0].compile(backend="aot_eager")
    distributed = distribute(parted, "data" if "started" in options else backend, options)
    try:
        with fault(options), nullcontext() if "digested" in options else taken_for_equal():
            if options & {"resumed", "started"}:
                distributed, found = resumed(distributed, backend, style, mode, options)
            else:
                found = train(distributed, style, mode, 4, options)
    except DpshardError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    expected = train_alone(style, mode, frozenset(options & {"tracked", *CORRELATED} | tied))
    before, trained, parameters = expected["before"], expected["trained"], whole(distributed)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    return {
        "copies": [float(p.sum()) for n, p in distributed.named_parameters() if n == "norm.weight"]
        if "plain" in options
        else [],
        "error": max(float((parameters[n] - p).norm() / change) for n, p in trained.items()),
        **{name: [found[name], expected[name]] for name in ("epsilon", "metrics")},
    }


if __name__ == "__main__":
    main(lambda: [compare(case) for case in sys.argv[1:]])
