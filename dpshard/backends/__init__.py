"""Where parameters, gradients and noise live: one process, DDP, FSDP2 or ZeRO. The engine finds out by itself."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.deepspeed.config import is_managed, is_model_engine
from dpshard.backends.local import LocalBackend
from dpshard.errors import ConfigurationError


def choose(model: nn.Module) -> LocalBackend:
    """The back-end for what `model` is wrapped in."""
    if is_model_engine(model):
        from dpshard.backends.deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(model)
    if is_managed(model):
        raise ConfigurationError(
            f"{type(model).__name__} is trained by DeepSpeed, which takes its gradients before they have their noise. "
            f"Make the engine for what deepspeed.initialize() returns: PrivacyEngine(model_engine, ...)."
        )
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ConfigurationError(
            "nn.DataParallel runs copies of the modules in threads, into which dpshard cannot see. Start a process for "
            "each GPU, and wrap the model in DistributedDataParallel (see docs/sharding.md)."
        )
    if not dist.is_available() or not dist.is_initialized():
        return LocalBackend(model)
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from dpshard.backends.ddp import DDPBackend
    from dpshard.backends.fsdp2 import FSDP2Backend

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigurationError(
            "FullyShardedDataParallel (FSDP1) flattens several parameters into one, of which dpshard cannot tell the "
            "parts. Take FSDP2: fully_shard(model); fsdp_version=2 of accelerate, which its launcher has as "
            "--fsdp_version 2."
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return FSDP2Backend(model)
    if isinstance(model, DistributedDataParallel):
        return DDPBackend(model)
    if dist.get_world_size() > 1:
        raise ConfigurationError(
            f"{dist.get_world_size()} processes are running, but {type(model).__name__} is not distributed: each would "
            f"train a model of its own. Wrap it in DistributedDataParallel, or call fully_shard on it, and make the "
            f"engine of the result. (A compiled model is wrapped, not the other way round: "
            f"DistributedDataParallel(torch.compile(model)).)"
        )
    return LocalBackend(model)
