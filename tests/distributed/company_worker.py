"""One rank of a model whose forward reaches over ranks; prints what it was told, case by case.

Usage: torchrun --nproc_per_node=2 company_worker.py KIND:CASE...; each rank reports per case [error class, message].
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import DpshardError
from tests.distributed.rank import main

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))


def gathered(x: Tensor) -> Tensor:
    """The rows of all ranks; those of others have no gradient."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.detach())
    found[dist.get_rank()] = x
    return torch.cat(found)


def global_mean(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def summed(gradient: Tensor) -> Tensor:
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient)
    return gradient


class SumInBackward(torch.autograd.Function):
    """What Megatron puts before a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return summed(gradients[0])


class Model(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.case = case
        if case == "back-module-hook":
            self.second.register_full_backward_hook(lambda _, inputs, outputs: tuple(map(summed, inputs)))
        elif case == "back-module-pre-hook":
            self.second.register_full_backward_pre_hook(lambda _, outputs: tuple(map(summed, outputs)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.case == "global-mean":
            h = h - global_mean(h)
        elif self.case == "other-ranks":  # a sample's own negatives are those of the other rank
            others = gathered(h).unflatten(0, (-1, len(h)))[1 - dist.get_rank()]
            h = h - 0.1 * others.mean(0)
        elif self.case == "back-function":
            h = SumInBackward.apply(h)  # type: ignore[assignment]
        elif self.case == "back-hook" and h.requires_grad:
            h.register_hook(summed)
        elif self.case == "contrastive":
            scores = h @ gathered(h).T
            return F.cross_entropy(scores, torch.arange(len(h)) + len(h) * dist.get_rank())
        return self.second(h)


def check(case: str) -> tuple[str, str]:
    """Train one step; the class and the message of the error that stops it."""
    kind, _, name = case.partition(":")
    torch.manual_seed(0)
    model: Any = Model(name)
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    engine = PrivacyEngine(model, batch_size=32, sample_size=32, steps=3, noise_multiplier=1.0)
    try:
        for logical_batch in engine.batches(DATA, 8, steps=1):
            for (x,) in logical_batch:
                model(x).square().mean().backward()
            engine.privatize()
    except DpshardError as error:
        return type(error).__name__, str(error)
    finally:
        engine.detach()
    return "", ""


main(lambda: [check(case) for case in sys.argv[1:]])
