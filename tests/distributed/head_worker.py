"""One step of a language model whose tied head is read in chunks; every rank reports the error of its whole update.

Usage: torchrun --nproc_per_node=2 head_worker.py CASE...

A case is ddp, fsdp2 (the table in the root's unit), two-passes (the same), or the ZeRO stage of DeepSpeed: zero2,
zero3, or zero-untied3, whose head no module calls. own-unit reads a head that is not gathered: the report is its error.
"""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard.errors import DpshardError
from tests.distributed.rank import main
from tests.oracle import clipped_mean, noise_free_engine, norm, per_sample_gradients, relative_error
from tests.test_chunked_loss import Model, pairs

N = 5


def network(*, tied: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(tied=tied, bias=True).double()


def report(case: str) -> float | str:
    if case != "own-unit":
        return error(case)
    try:
        return error(case)
    except DpshardError as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def error(case: str) -> float:
    torch.manual_seed(1)
    data = pairs(N)
    per_sample = per_sample_gradients(network(tied=is_tied(case)), [data], loss)
    R = sorted(norm(g) for g in per_sample)[N // 2] * 0.999
    found = of_deepspeed(case, data, R) if case.startswith("zero") else of_torch(case, data, R)
    return relative_error(found, clipped_mean(per_sample, max_grad_norm=R, batch_size=N))


def is_tied(case: str) -> bool:
    return case not in ("own-unit", "zero-untied3")


def loss(output: Tensor) -> Tensor:
    return output.mean(1).mean()


def of_torch(case: str, data: Tensor, R: float) -> Mapping[str, Tensor]:
    """The update of DDP or FSDP2."""
    model: torch.nn.Module = network(tied=is_tied(case))
    if case == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model.body)
        if case == "own-unit":
            fully_shard(model.head)
        fully_shard(model)
    mode = "ghost" if case == "two-passes" else "auto"
    engine = noise_free_engine(model, batch_size=N, sample_size=N, max_grad_norm=R, clipping_mode=mode)
    for logical_batch in engine.batches(TensorDataset(data), 2):
        for (x,) in logical_batch:
            loss(model(x)).backward()
        engine.privatize()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def of_deepspeed(case: str, data: Tensor, R: float) -> Mapping[str, Tensor]:
    """The update of DeepSpeed, which trains in float32: the step of SGD at learning rate 1."""
    from tests.distributed.deepspeed_setup import configuration, start, whole

    model = network(tied=is_tied(case)).float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model_engine = start(model, configuration(int(case[-1])), torch.optim.SGD(model.parameters(), lr=1.0))
    engine = noise_free_engine(model_engine, batch_size=N, sample_size=N, max_grad_norm=R)
    for logical_batch in engine.batches(TensorDataset(data), 2):
        for (x,) in logical_batch:
            model_engine.backward(loss(model_engine(x)))
        model_engine.step()
    return {name: (before[name] - p).double() for name, p in whole(model).items()}


if __name__ == "__main__":
    main(lambda: [report(case) for case in sys.argv[1:]])
