"""Optimizer, and wrapping of both model and optimizer for --shard."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dpshard.applications.cli.settings import TrainSettings
from dpshard.errors import ConfigurationError
from dpshard.recipes import DP_BERT


@dataclass(frozen=True)
class Sharded:
    """A wrapped model with its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    """Innermost optimizer, for schedulers and checkpoints."""
    step: Callable[[], None]
    """Takes a step, and drops the gradients."""
    weights: Callable[[], dict[str, Any]]
    """Returns the weights on rank 0; all ranks must call it."""
    parameters: int
    """Number of trained elements."""


def shard(model: nn.Module, settings: TrainSettings, device: torch.device) -> Sharded:
    """Wrap `model`, which must be equal on all ranks."""
    count, how = sum(p.numel() for p in model.parameters() if p.requires_grad), settings.shard
    if how.startswith("deepspeed"):
        engine = _deepspeed_engine(model, int(how[-1]), device, make_optimizer(model, settings))
        return Sharded(engine, engine.optimizer.optimizer, engine.step, lambda: _zero_weights(model), count)
    model = _wrapped(model, how, device)
    optimizer = make_optimizer(model, settings)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return Sharded(model, optimizer, step, lambda: get_model_state_dict(model, options=options), count)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> Optimizer:
    """Return the optimizer of the settings, over trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr, decay = settings.learning_rate, settings.weight_decay
    assert lr is not None  # see fitting
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, settings.momentum, weight_decay=decay)
    if settings.optimizer == "dp-bert":
        return replace(DP_BERT, learning_rate=lr, weight_decay=decay).optimizer(parameters)
    adam = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, lr, weight_decay=decay)


def _wrapped(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    if how == "none":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    world = dist.get_world_size()
    sizes, names = ((world,), ("shard",)) if how == "fsdp2" else (_replicas(world), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):  # transformer blocks
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _replicas(world: int) -> tuple[int, int]:
    """Return replicas (one per machine, or two on one machine) and shards of each."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    replicas = world // local if world > local else 2
    if world % replicas:
        raise ConfigurationError(
            f"shard='hsdp' divides the ranks into {replicas} replicas of one size, but there are {world} ranks. Take "
            f"a multiple of {replicas}, or --shard fsdp2."
        )
    return replicas, world // replicas


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def require_deepspeed() -> None:
    """Raise ConfigurationError unless DeepSpeed is installed."""
    if find_spec("deepspeed") is None:
        raise ConfigurationError(
            'DeepSpeed is not installed. Run: pip install --no-build-isolation "dpshard[deepspeed]", or take --shard '
            "fsdp2, which shards parameters, gradients and optimizer state as ZeRO-3 does."
        )


def _deepspeed_engine(model: nn.Module, stage: int, device: torch.device, optimizer: Optimizer) -> Any:
    # DeepSpeed selects an accelerator during its import, even a GPU that the user excluded.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed would compile this C++ extension for CPU collectives; gloo does not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # See docs/sharding-deepspeed.md. Only samplers and counters use the size of a micro-batch.
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config |= {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, "steps_per_print": 2**62}
    config |= {"zero_allow_untested_optimizer": True}
    parts: Any = {"model": model, "optimizer": optimizer}
    parts["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(**parts, config=config)[0]


def _zero_weights(model: nn.Module) -> dict[str, Any]:
    import deepspeed

    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value]):
            if dist.get_rank() == 0:
                found[name] = value.detach().cpu().clone()
    return found
