"""Where parameters, gradients and noise live: one process, DDP, FSDP2 or ZeRO. The engine finds out by itself."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.deepspeed.config import is_managed, is_model_engine
from dpshard.backends.local import LocalBackend
from dpshard.backends.model_parallel import (
    refuse_foreign_placements,
    require_all_ranks,
    require_known_group,
    require_one_training,
)
from dpshard.errors import ConfigurationError

__all__ = ["choose", "require_one_training"]


def choose(model: nn.Module, model_parallel_group: Any = None) -> LocalBackend:
    """The back-end for what `model` is wrapped in.

    Raises ConfigurationError for what is not supported, and for ranks that share no data, see PrivacyEngine.
    """
    require_known_group(model_parallel_group)
    backend = _chosen(model)
    try:
        require_all_ranks(backend, model_parallel_group=model_parallel_group)
    except ConfigurationError:
        backend.detach()
        raise
    return backend


def _chosen(model: nn.Module) -> LocalBackend:
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
        refuse_foreign_placements(model)
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
    refuse_foreign_placements(model)
    return DDPBackend(model) if isinstance(model, DistributedDataParallel) else LocalBackend(model)
