"""Streams, loops of the user's own, and balls in bins; every rank reports [message, released gradients] case by case.

Usage: torchrun --nproc_per_node=2 orders_worker.py CASE...
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from dpshard import PrivacyEngine, UnitDataset
from dpshard.errors import DataError
from tests.distributed.rank import main

N, B, STEPS = 21, 4, 7


def data() -> TensorDataset:
    return TensorDataset(torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2)


class Items(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, order: Iterable[int]) -> None:
        self.order = list(order)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        samples = data()
        return (samples[i] for i in self.order)


class Unknown(Dataset[tuple[Tensor, ...]]):
    def __init__(self, size: int = N) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return data()[index]


def indexed(case: str) -> Dataset[Any]:
    """A map-style data set of all samples; "own": every rank splits by a seed of its own, as for its dropout."""
    if case in ("", "unknown"):
        return Unknown() if case else data()
    if case == "own-files":  # in the order in which each machine lists them
        return ConcatDataset([Unknown(14), Unknown(N - 14)] if dist.get_rank() else [Unknown(N - 14), Unknown(14)])
    if case.endswith("units"):  # numbered in the order of a set, which is another one in every process
        numbers = torch.randperm(N, generator=torch.Generator().manual_seed(dist.get_rank()))
        units = UnitDataset(Unknown(), numbers, rows_per_unit=1)
        return Subset(units, range(N)) if case == "subset-of-own-units" else units
    rank = dist.get_rank() if case.startswith("own") else 0
    whole: Any = Unknown() if "unknown" in case else data()
    return random_split(whole, [N, 0], torch.Generator().manual_seed(rank))[0]


def own_loader(case: str) -> Iterator[Any]:
    """Micro-batches of a rank, two a step."""
    samples: Any = data()
    whole: dict[str, Any] = {"shuffle": False}
    if not dist.is_initialized():
        samples = Subset(samples, range(N - N % 2))  # what drop_last=True leaves to two ranks
    if case != "unsharded" and dist.is_initialized():
        whole = {"sampler": DistributedSampler(samples, shuffle=case == "shuffled", drop_last=case != "repeating")}
    for epoch in range(2):
        if case == "shuffled" and "sampler" in whole:
            whole["sampler"].set_epoch(epoch)
        yield from DataLoader(samples, batch_size=B // (dist.get_world_size() if dist.is_initialized() else 1), **whole)


def train(engine: PrivacyEngine, kind: str, case: str) -> Iterator[list[float]]:
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)

    def released() -> list[float]:
        optimizer.step()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in engine.model.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad()
        return torch.cat([grad.flatten() for grad in grads if grad is not None]).tolist()

    if kind == "loop":
        for x, y in own_loader(case):
            F.cross_entropy(engine.model(x), y).backward()
            yield released()
            if engine.step == STEPS:
                return
        return
    order = list(range(N))
    if case == "own-part":
        order = order[dist.get_rank() :] + order[: dist.get_rank()]
    for batch in engine.batches(Items(order) if kind == "stream" else indexed(case), 2):
        for x, y in batch:
            F.cross_entropy(engine.model(x), y).backward()
        yield released()


def outcome(name: str) -> tuple[str, list[list[float]]]:
    backend, kind, case = name.split(":")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if backend == "ddp":
        model = DistributedDataParallel(model)
    elif backend == "fsdp2":
        fully_shard(model)
    sampling: Any = "balls-in-bins" if kind == "bins" else "fixed-order"
    facts = {"batch_size": B, "sample_size": N, "steps": STEPS, "noise_multiplier": 0, "verify": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing noise, which depends on the rounding of sums
        engine = PrivacyEngine(model, sampling=sampling, **facts)
    engine._secret = bytes(range(32))
    found: list[list[float]] = []
    try:
        found.extend(train(engine, kind, case))
    except DataError as error:
        return str(error), found
    return "", found


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
