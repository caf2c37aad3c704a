"""One step over packed documents; every rank reports the error of its whole update, case by case.

Usage: torchrun --nproc_per_node=2 packed_worker.py CASE...

A case is KIND[+OPTION...]. KIND: ddp, fsdp2, hsdp (replicated, shards of one rank), or zero1, zero2, zero3 (DeepSpeed).
Options: a clipping style; a clipping mode; automatic (clipping); checkpoint, compile (every block); workers (of the
loader); uneven (documents that fill more micro-batches on one rank); across (attention that looks across, for which
the report is the name of the error), across-there (on rank 1 only); own: a loop that packs its own rows, of one
document, then of several, on other ranks at other times; it has two micro-batches.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpshard import PrivacyEngine, packed_unit_ids
from dpshard.clipping.groups import STYLES
from dpshard.config import CLIPPING_MODES
from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.oracle import noise_free_engine, relative_error
from tests.packing.models import PACKING, Blocks, T, U, documents, expected, groups_of, inputs, unit_losses

Update = dict[str, Tensor]


def report(case: str) -> float | str:
    kind, *options = case.split("+")
    # With lengths in this order, rank 0 packs long documents and rank 1 short ones.
    uneven = "uneven" in options
    docs = documents(lengths=[T if i % 2 == 0 else 2 for i in range(14)]) if uneven else documents()
    settings: dict[str, Any] = {"clipping_style": _one(options, STYLES, "all-layer")}
    settings["clipping_mode"] = _one(options, CLIPPING_MODES, "auto")
    settings["clipping_fn"] = "automatic" if "automatic" in options else "abadi"
    plain = Blocks()
    groups = groups_of(plain, settings["clipping_style"])
    R, update = expected(plain, docs, groups=groups, clipping_fn=settings["clipping_fn"])
    settings |= {"batch_size": len(docs), "sample_size": len(docs), "max_grad_norm": R}
    across = "across" in options or ("across-there" in options and dist.get_rank() == 1)
    model = Blocks(segments=not across, checkpoints="checkpoint" in options)
    try:
        run = of_deepspeed if kind.startswith("zero") else of_torch
        return relative_error(run(kind, options, model, docs, settings), update)
    except DpshardError as refusal:
        return type(refusal).__name__


def _one(options: list[str], choices: Iterable[str], default: str) -> str:
    return next((option for option in options if option in choices), default)


def _compiled(model: Blocks, options: list[str]) -> None:
    if "compile" in options:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager")


def of_torch(kind: str, options: list[str], bare: Blocks, docs: list[Tensor], settings: Any) -> Update:
    """The update of DDP, FSDP2 or HSDP."""
    model: nn.Module = bare
    _compiled(bare, options)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        shape = {"hsdp": (2, 1), "fsdp2": (2,)}[kind]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for block in bare.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    engine = noise_free_engine(model, **settings)
    if "own" in options:
        for batch in own_rows(docs):
            with engine.packed(batch["unit_ids"], U):
                unit_losses(model(*inputs(batch)), batch).mean().backward()
        engine.privatize()
    else:
        for batch in _batches(engine, docs, options, engine.privatize):
            unit_losses(model(*inputs(batch)), batch).mean().backward()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def of_deepspeed(kind: str, options: list[str], model: Blocks, docs: list[Tensor], settings: Any) -> Update:
    """The update of DeepSpeed, which trains in float32: the step of SGD at learning rate 1."""
    from tests.distributed.deepspeed_setup import configuration, start, whole

    model = model.float()
    _compiled(model, options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model_engine = start(model, configuration(int(kind[-1])), torch.optim.SGD(model.parameters(), lr=1.0))
    engine = noise_free_engine(model_engine, **settings)
    for batch in _batches(engine, docs, options, model_engine.step):
        model_engine.backward(unit_losses(model_engine(*inputs(batch)), batch).mean())
    return {name: (before[name] - p).double() for name, p in whole(model).items()}


def _batches(engine: PrivacyEngine, docs: list[Tensor], options: list[str], step: Any) -> Iterator[dict[str, Tensor]]:
    workers = 1 if "workers" in options else 0
    for logical_batch in engine.batches(docs, U, packing=PACKING, num_workers=workers):
        yield from logical_batch
        step()


def own_rows(docs: list[Tensor]) -> list[dict[str, Tensor]]:
    """The documents of this rank: one, and then the other three in a row; on rank 1 the other way round."""
    mine = docs[dist.get_rank() :: 2]
    split = [mine[:1], mine[1:]] if dist.get_rank() == 0 else [mine[:3], mine[3:]]
    return [row(some) for some in split]


def row(docs: list[Tensor]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(len(ids)) for ids in docs])[None]
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": positions,
        "unit_ids": packed_unit_ids(position_ids=positions),
        "labels": torch.cat(docs)[None],
    }


if __name__ == "__main__":
    main(lambda: [report(case) for case in sys.argv[1:]])
