"""One rank of a two-distribution audit, of the engine as it is and with noise divided by the number of ranks.

Usage: torchrun --nproc_per_node=W audit_worker.py ddp|fsdp2; a rank reports, for each, whether it was refuted, and mu.
"""

import sys

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dpshard.engine
from dpshard.audit import audit_steps
from tests.audit import faults
from tests.audit.test_steps import classifier
from tests.distributed.rank import main


def sharded(model: nn.Module) -> nn.Module:
    if sys.argv[1] == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def audit() -> list[tuple[bool, float]]:
    dpshard.engine.new_run_secret = lambda: bytes(range(32))
    results = []
    for faulty in (False, True):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if faulty:
                faults.weaken_noise(monkeypatch, dist.get_world_size())
            found = audit_steps(*classifier(), trials=400, clipping_fn="abadi", prepare=sharded)
        results.append((found.refuted_at() is not None, found.trials.mu(0.95)))
    return results


main(audit)
