"""One rank of loops that move or mask rows where one rank alone has padding; prints what it was told, case by case.

Usage: torchrun --nproc_per_node=2 rows_worker.py CASE...; each rank reports per case [message, clipped sum by
parameter].
"""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import DpshardError
from tests.distributed.rank import main

N = 15  # rank 0 has 8 samples, rank 1 has 7: of two micro-batches of 4, one row is padding
GENERATOR = torch.Generator().manual_seed(0)
DATA = TensorDataset(10 * torch.randn(N, 3, generator=GENERATOR), torch.arange(N) % 2)


def loss_of(what: str, model: nn.Module, x: Tensor, y: Tensor, is_padding: Tensor) -> Tensor:
    if what == "shuffled":
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x[order]), y[order])
    if what == "reversed":
        return F.cross_entropy(model(x.flip(0)), y.flip(0))
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses[~is_padding].mean() if what == "masked" else losses.mean()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def outcome(case: str) -> tuple[str, list[list[float]]]:
    kind, _, what = case.partition(":")
    pad = not what.startswith("unpadded")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    trained: nn.Module = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noise_multiplier=0
        engine = PrivacyEngine(trained, batch_size=N, sample_size=N, steps=1, noise_multiplier=0.0, clipping_fn="abadi")
    before = [whole(p).detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    told = ""
    try:
        for logical_batch in engine.batches(DATA, 4, pad=pad):
            for x, y in logical_batch:
                loss_of(what.removeprefix("unpadded-"), trained, x, y, logical_batch.is_padding).backward()
            optimizer.step()
    except DpshardError as error:
        told = str(error)
    return told, [
        ((a - whole(p).detach()) * N).flatten().tolist() for a, p in zip(before, model.parameters(), strict=True)
    ]


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
