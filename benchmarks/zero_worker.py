"""One rank of `python -m benchmarks zero`: trains sharded models, with and without privacy, and reports on rank 0.

Usage: torchrun ... -m benchmarks.zero_worker JOB, where JOB is the JSON of benchmarks/zero.py.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.workloads import POOL, Workload, find, loss
from benchmarks.zero import ORDINARY
from dpshard import PrivacyEngine
from dpshard.applications.benchmark import interleave
from dpshard.applications.benchmark.memory import peak_of, return_what_is_freed
from dpshard.applications.benchmark.training import LEARNING_RATE, STEPS, expected_batch
from dpshard.applications.cli.plan import parse_clipping


def main() -> None:
    """Do the job of the command line on this rank."""
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    on_gpu = job["device"] == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    workload = find(job["workload"], tiny=job["tiny"])
    if job["compiled"]:
        torch._dynamo.config.recompile_limit = 64  # equal blocks of several models share their code
    names = job["names"]
    if job["what"] == "time":
        steps = {name: Sharded(job, workload, name).step for name in names}
        result: dict[str, Any] = interleave(steps, rounds=job["rounds"])
    else:
        return_what_is_freed()
        Sharded(job, find(job["workload"], tiny=True), names[0]).step()  # loads the code of a step
        result = {names[0]: peak_of(lambda: Sharded(job, workload, names[0]).step)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        slowest = everyone[0] if job["what"] == "time" else {names[0]: max(r[names[0]] for r in everyone)}
        print("RESULT", json.dumps(slowest), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort an orderly exit


class Sharded:
    """A model, sharded by a stage, and its whole training step: SGD, micro-batches of B rows a rank."""

    def __init__(self, job: dict[str, Any], workload: Workload, name: str) -> None:
        self.job, self.rows = job, workload.batch
        self.device = torch.device(job["device"])
        world = dist.get_world_size()
        x, y = workload.data(POOL * self.rows * world)
        self.data = x.to(self.device), y.to(self.device)
        with self.device:  # a GPU draws the weights of large models in no time
            model = workload.build().train()
        if job["compiled"]:
            for block in getattr(model, "blocks", [model]):
                block.compile()
        self.model, make_optimizer = self._shard(model)
        self.autocast = job["precision"] == "bf16" and not job["stage"].startswith(("fsdp2", "deepspeed"))
        self.batches = self._ordinary() if name == ORDINARY else self._private(name, world)
        self.optimizer = make_optimizer()

    def _shard(self, model: nn.Module) -> tuple[nn.Module, Callable[[], Any]]:
        stage, bf16 = self.job["stage"], self.job["precision"] == "bf16"
        if stage in ("ddp", "zero1"):
            wrapped = DistributedDataParallel(model, find_unused_parameters=False)
            if stage == "ddp":
                return wrapped, lambda: _sgd(model)
            return wrapped, lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LEARNING_RATE)
        if stage.startswith("fsdp2"):
            mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
            for block in getattr(model, "blocks", []):
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage != "fsdp2-kept")
            fully_shard(model, mesh=mesh, mp_policy=policy)
            return model, lambda: _sgd(model)
        return self._deepspeed(model, int(stage[-1]), bf16)

    def _deepspeed(self, model: nn.Module, stage: int, bf16: bool) -> tuple[nn.Module, Callable[[], Any]]:
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        if self.device.type == "cpu":
            # DeepSpeed would compile a C++ extension for its collectives on the CPU; gloo needs none.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        if bf16:
            config["bf16"] = {"enabled": True}
        engine = deepspeed.initialize(model=model, optimizer=_sgd(model), config=config)[0]
        return engine, lambda: engine

    def _ordinary(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            index_B = torch.randperm(len(self.data[0]), generator=generator)[: self.rows].to(self.device)
            yield [(self.data[0][index_B], self.data[1][index_B])]

    def _private(self, clipping: str, world: int) -> Iterator[Any]:
        style, mode = parse_clipping(clipping)
        engine = PrivacyEngine(
            self.model,
            batch_size=expected_batch(self.rows * world),
            sample_size=len(self.data[0]),
            steps=STEPS,
            max_batch_size=self.rows * world,
            clipping_fn="abadi",
            noise_multiplier=1.0,
            clipping_style=style,
            clipping_mode=mode,
        )
        return engine.batches(TensorDataset(*self.data), micro_batch_size=self.rows)

    def step(self) -> None:
        """Take one step of all ranks."""
        for x, y in next(self.batches):
            if x.is_floating_point() and self.job["stage"].startswith("deepspeed") and self.job["precision"] == "bf16":
                x = x.bfloat16()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                value = loss(self.model(x), y)
            if self.optimizer is self.model:
                self.model.backward(value)
            else:
                value.backward()
        self.optimizer.step()
        if self.optimizer is not self.model:
            self.optimizer.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


if __name__ == "__main__":
    main()
