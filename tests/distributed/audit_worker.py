"""One rank of a two-distribution audit, of the engine as it is and with noise divided by the number of ranks.

Usage: torchrun --nproc_per_node=W audit_worker.py TRIALS:BACKEND [...], one of ddp, fsdp2, deepspeed-1, -2, -3.

A rank reports, for each case and each of the two engines, whether it was refuted, and mu; before them, the largest
error of the gradients and parameters that an audit is shown, against those of one process.
"""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dpshard.engine
from dpshard import PrivacyEngine
from dpshard.applications.audit import audit_steps
from dpshard.backends.local import local_backend
from tests.applications.audit import faults
from tests.applications.audit.test_steps import classifier
from tests.distributed.rank import main
from tests.sums import taken_for_equal


def sharded(model: nn.Module, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how.startswith("deepspeed"):
        from tests.distributed.deepspeed_setup import configuration, start

        return start(model, configuration(int(how[-1])), torch.optim.SGD(model.parameters(), lr=0.5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shown(how: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All gradients that one step releases, and all parameters, as audits read them."""
    model, x, y, loss = classifier()
    wrapped = model if how == "none" else sharded(model, how)
    engine = PrivacyEngine(wrapped, batch_size=4, sample_size=4, steps=1, noise_multiplier=0.1)
    rank, ranks = (0, 1) if how == "none" else (dist.get_rank(), dist.get_world_size())
    loss(wrapped(x[rank::ranks]), y[rank::ranks]).mean().backward()
    engine.privatize()
    names = engine.mechanism.clipping_groups[0]
    found = (
        {n: engine.internals.full_gradient(n) for n in names},
        {n: engine.internals.full_value(n).clone() for n in names},
    )
    engine.detach()
    return found


def audit(case: str) -> tuple[float, list[tuple[bool, float]]]:
    count, how = case.split(":")
    trials = int(count)
    with taken_for_equal():  # which the sums are, but for rounding
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("dpshard.engine.choose", lambda model, *told: local_backend(model))
            expected = shown("none")
        found = shown(how)
    pairs = ((ours[n], own[n]) for ours, own in zip(found, expected, strict=True) for n in own)
    error = max(float((a - b).abs().max()) for a, b in pairs)
    results = []
    for faulty in (False, True) if trials else ():
        with pytest.MonkeyPatch.context() as monkeypatch:
            if faulty:
                faults.weaken_noise(monkeypatch, dist.get_world_size())
            found = audit_steps(*classifier(), trials=trials, clipping_fn="abadi", prepare=lambda m: sharded(m, how))
        results.append((found.refuted_at() is not None, found.trials.mu(0.95)))
    return error, results


def audits() -> list[Any]:
    dpshard.engine.new_run_secret = lambda: bytes(range(32))
    return [audit(case) for case in sys.argv[1:]]


if __name__ == "__main__":
    main(audits)
