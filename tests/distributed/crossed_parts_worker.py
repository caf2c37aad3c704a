"""One rank of trainings under tensor and context parallelism together, each compared with one process; prints JSON.

Usage: torchrun --nproc_per_node=W crossed_parts_worker.py WRAPPER:STYLE:MODE[+OPTION...] [...]

Models lie on the mesh (replicate, data, context, tensor) of SIZES[W], in the form of tensor_parallel_worker.py.
Wrappers: alone, fsdp2 (FSDP2 over the data ranks), flat (over data and context ranks), hsdp (flat, with replicas).
Options: those of tensor_parallel_worker.parallelize, ring (torch's context_parallel instead of keys and values gathered
by hand), verified, checkpoint, digested, strangers (tensor-parallel ranks get different samples), saved (a checkpoint
after the first step goes on under FSDP2 alone), cut (declares a part by dimension), and the planted faults of FAULTS.
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
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.backends.crossed_parts import PartsOfTerms
from dpshard.backends.model_parts import ModelParts
from dpshard.clipping.group_tape import GroupTape
from dpshard.errors import DpshardError
from dpshard.records import PerSampleGrad, Record
from tests import seeds
from tests.distributed.declared_parts_worker import Gathered
from tests.distributed.rank import alone, main
from tests.distributed.ring import ring
from tests.distributed.tensor_parallel_worker import SECRET, D, H, Model, T, V, begun, parallelize, whole
from tests.sums import taken_for_equal

SAMPLES, STEPS = 24, 2
SIZES = {4: (1, 1, 2, 2), 8: (1, 2, 2, 2)}
"""Of the mesh by ranks, but for hsdp, which has replicas in place of data ranks."""


class Context(nn.Module):
    """The attention of tensor_parallel_worker.py on parts of sequences of `group`; by torch's ring without."""

    def __init__(self, whole: Any, group: Any, rank: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = whole.wq, whole.wk, whole.wv, whole.wo
        self.group, self.rank = group, rank

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // H)) for f in (self.wq, self.wk, self.wv))
        if self.group is None:
            y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True, scale=1.0)
            return self.wo(y.transpose(1, 2).flatten(2))
        q, k, v = (z.transpose(1, 2) for z in (q, Gathered.apply(k, self.group), Gathered.apply(v, self.group)))
        first = self.rank * q.shape[2]
        bias = torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype).triu(1 + first)
        return self.wo(((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


def distribute(model: Model, wrapper: str, options: set[str]) -> tuple[nn.Module, DeviceMesh]:
    replicas, data, context, tensor = SIZES[dist.get_world_size()]
    if wrapper == "hsdp":
        replicas, data = data, replicas
    names = ("replicate", "data", "context", "tensor")
    mesh = init_device_mesh("cpu", (replicas, data, context, tensor), mesh_dim_names=names)
    parallelize(model, mesh["tensor"], options)
    over = mesh["context"]
    for block in model.blocks:
        own = Context(block.attention, None if "ring" in options else over.get_group(), over.get_local_rank())
        own._forward_pre_hooks.update(block.attention._forward_pre_hooks)  # pyright: ignore
        own._forward_pre_hooks_with_kwargs.update(block.attention._forward_pre_hooks_with_kwargs)  # pyright: ignore
        block.attention = own
    if wrapper == "alone":
        return model, mesh
    sharded = mesh["data"] if wrapper == "fsdp2" else mesh["data", "context"]._flatten("shards")
    if wrapper == "hsdp":
        sharded = DeviceMesh._concatenate([mesh["replicate"], sharded])
    for block in (*model.blocks, model):
        fully_shard(block, mesh=sharded)
    return model, mesh


def train(
    model: nn.Module, style: str, mode: str, options: set[str], mesh: Any = None, folder: str = "", until: int = STEPS
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(*(torch.randint(0, V, (SAMPLES, T), generator=generator) for _ in range(2)))
    group = None if mesh is None else mesh["context"].get_group()
    parts = {"*.wq.weight": 0, "*": "sum"} if "cut" in options else {"*": "sum"}
    engine = PrivacyEngine(
        model,
        batch_size=10,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=0.3,
        max_grad_norm=1.1,
        clipping_fn="abadi",
        clipping_style=style,
        clipping_mode=mode,
        accountant="gdp",
        verify="verified" in options,
        **({} if group is None else {"model_parallel_group": group, "model_parallel_parts": parts}),
    )
    seeds.give_secret(engine, SECRET)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, foreach=False)
    checkpointer = Checkpointer(folder, engine, optimizer) if folder else None
    if checkpointer is not None:
        checkpointer.load()
    for logical_batch in engine.batches(dataset, 3):
        for x, y in logical_batch:
            if "strangers" in options and dist.get_rank() % 2:
                x = torch.cat([x[:1].flip(1), x[1:]])
            if group is not None and "ring" not in options:
                x, y = (z.chunk(group.size(), 1)[dist.get_rank(group)] for z in (x, y))
            with ring(group, x, y) if group is not None and "ring" in options else nullcontext():
                losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
                (losses.view(len(x), -1).sum(1) / T).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.save()
        if engine.step == until:
            break
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics()}


def resumed(first: nn.Module, style: str, mode: str, options: set[str], mesh: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model and figures after one step in parts, and the rest from a checkpoint under FSDP2, on whole samples."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    torch.manual_seed(1)  # other parameters: those of the checkpoint count
    second = Model().double()
    for block in (*second.blocks, second):
        fully_shard(block)
    try:
        train(first, style, mode, options, mesh, shared[0], until=1)
        return second, train(second, style, mode, options, None, shared[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(shared[0])


# --- planted faults ---------------------------------------------------------------------------------------------------


def _own_slice_only(parts: PartsOfTerms, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return ModelParts.norm_sq(parts, cut_B, whole_B)


def _whole_counted_by_each(parts: PartsOfTerms, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return parts.terms.over_ranks(parts.over_ranks(cut_B + whole_B))


def _own_part_only(parts: PartsOfTerms, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return parts.terms.over_ranks(cut_B + whole_B)


def _terms_squared(tape: GroupTape, name: str, entries: Any) -> Record:
    """Square terms before they are added over the context ranks: the norm of each is that of unlike vectors."""
    parts: Any = tape.roots.parts
    first, *others = (record.per_sample() for _, record in tape._at_root(name, entries))
    term = sum(others, first)
    own = parts.sliced(name, term)
    squares = parts.terms.summed(term.flatten(1).square().sum(1))
    sliced = parts.terms.summed(own.square().sum(1))
    return PerSampleGrad(own * (squares / sliced.clamp(min=1e-30)).sqrt()[:, None])


def _equal_everywhere(parts: PartsOfTerms, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    """Norms of the library, which must be bitwise equal on all ranks of a model."""
    norm_sq_B = NORM_SQ(parts, cut_B, whole_B)
    everyone = parts.terms.gather(parts.gather(norm_sq_B))
    assert torch.equal(everyone, norm_sq_B.expand_as(everyone))
    return norm_sq_B


NORM_SQ, PLACE = PartsOfTerms.norm_sq, "dpshard.backends.crossed_parts.PartsOfTerms.norm_sq"
FAULTS: dict[str, tuple[str, Any]] = {
    "own-slice-only": (PLACE, _own_slice_only),
    "own-part-only": (PLACE, _own_part_only),
    "whole-counted-by-each": (PLACE, _whole_counted_by_each),
    "terms-squared": ("dpshard.clipping.group_tape.GroupTape._slice", _terms_squared),
}


@alone
def train_alone(style: str, mode: str) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it begins and ends with."""
    model = begun(set())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    figures = train(model, style, mode, set())
    return {**figures, "before": before, "trained": {name: p.detach() for name, p in model.named_parameters()}}


def compare(case: str) -> dict[str, Any]:
    seeds.fix(case)
    wrapper, style, mode = case.split(":")
    mode, *chosen = mode.split("+")
    options = set(chosen)
    parted = begun(set())
    parted.checkpointed = "checkpoint" in options
    model, mesh = distribute(parted, wrapper, options)
    planted = next(
        (mock.patch(*FAULTS[name]) for name in options & FAULTS.keys()), mock.patch(PLACE, _equal_everywhere)
    )
    try:
        with planted, nullcontext() if "digested" in options else taken_for_equal():
            if "saved" in options:
                model, found = resumed(model, style, mode, options, mesh)
            else:
                found = train(model, style, mode, options, mesh)
    except DpshardError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    expected = train_alone(style, mode)
    before, trained, parameters = expected["before"], expected["trained"], whole(model)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    return {
        "error": max(float((parameters[n] - p).norm() / change) for n, p in trained.items()),
        **{name: [found[name], expected[name]] for name in ("epsilon", "metrics")},
    }


if __name__ == "__main__":
    main(lambda: [compare(case) for case in sys.argv[1:]])
