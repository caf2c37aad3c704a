"""One step over packed documents; every rank reports the error of its whole update, case by case.

Usage: torchrun --nproc_per_node=2 packed_worker.py CASE...

A case is ddp, fsdp2, or one of these with documents that fill more micro-batches on one rank (`-uneven`) or with
attention that looks across (`-across`): then the report is the name of the error. `-own`: a loop that packs its own
rows, of one document, then of several, on other ranks at other times; it has two micro-batches.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.oracle import noise_free_engine, relative_error
from tests.packing.models import PACKING, LanguageModel, T, U, documents, expected, inputs, unit_losses


def error(case: str) -> float | str:
    kind, _, how = case.partition("-")
    own = how.startswith("own")
    # With lengths in this order, rank 0 packs long documents and rank 1 short ones.
    docs = documents(lengths=[T if i % 2 == 0 else 2 for i in range(14)]) if how == "uneven" else documents()
    R, update = expected(LanguageModel(), docs)
    model: nn.Module = LanguageModel(segments=not how.endswith("across"))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    engine = noise_free_engine(model, batch_size=len(docs), sample_size=len(docs), max_grad_norm=R)
    try:
        if own:
            for batch in own_rows(docs):
                with engine.packed(batch["unit_ids"], U):
                    unit_losses(model(*inputs(batch)), batch).mean().backward()
            engine.privatize()
        for logical_batch in () if own else engine.batches(docs, U, packing=PACKING):
            for batch in logical_batch:
                unit_losses(model(*inputs(batch)), batch).mean().backward()
            engine.privatize()
    except DpshardError as refusal:
        return type(refusal).__name__
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return relative_error(found, update)


def own_rows(docs: list[Tensor]) -> list[dict[str, Tensor]]:
    """The documents of this rank: one, and then the other three in a row; on rank 1 the other way round."""
    mine = docs[dist.get_rank() :: 2]
    split = [mine[:1], mine[1:]] if dist.get_rank() == 0 else [mine[:3], mine[3:]]
    return [row(some) for some in split]


def row(docs: list[Tensor]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(len(ids)) for ids in docs])[None]
    ids = torch.cat(docs)[None]
    units = torch.cat([torch.full((len(ids),), i) for i, ids in enumerate(docs)])[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "unit_ids": units,
        "labels": torch.where(positions == 0, -100, ids),
    }


if __name__ == "__main__":
    main(lambda: [error(case) for case in sys.argv[1:]])
