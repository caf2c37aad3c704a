"""Back-ends: where parameters, gradients and noise live. Begin with `backend.py`.

`privatize` of a `GradientStore` adds the noise to a rank's shards (`grad_store.py`, `deepspeed/gradients.py`). It calls
`release_` of `noise/keyed.py`. May import `clipping`, `noise` and below.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.backend import Backend
from dpshard.backends.deepspeed.config import is_managed, is_model_engine, keep_linear
from dpshard.backends.local import local_backend
from dpshard.backends.model_parallel import (
    placed_parameters,
    processes,
    refuse_foreign_placements,
    refuse_later_group,
    require_all_ranks,
    require_known_group,
    require_one_training,
)
from dpshard.backends.model_parts import DeclaredParts
from dpshard.backends.stages import are_stages
from dpshard.backends.writes import updated_early
from dpshard.errors import ConfigurationError

__all__ = ["Backend", "choose", "processes", "refuse_later_group", "require_one_training", "updated_early"]


def choose(model: nn.Module, model_parallel_group: Any = None, model_parallel_parts: Any = None) -> Backend:
    """Return the back-end for the wrapper of `model`; PrivacyEngine explains the other arguments."""
    require_known_group(model_parallel_group, model_parallel_parts)
    keep_linear()
    declared: DeclaredParts | None = None
    if model_parallel_group is not None and model_parallel_group.size() > 1:
        declared = model_parallel_group, model_parallel_parts
    backend = _chosen(model, declared)
    try:
        require_all_ranks(
            backend.sharding.core, backend.communicator.world_size, model_parallel_group=model_parallel_group
        )
    except ConfigurationError:
        backend.detach()
        raise
    return backend


def _chosen(model: nn.Module, declared: DeclaredParts | None) -> Backend:
    if declared is not None and is_model_engine(model):
        raise ConfigurationError(
            "model_parallel_parts declares parts of a model under DistributedDataParallel, FSDP2 or neither. DeepSpeed "
            "is not supported here."
        )
    if is_model_engine(model):
        from dpshard.backends.deepspeed.gradients import deepspeed_backend

        return deepspeed_backend(model)
    if is_managed(model):
        raise ConfigurationError(
            f"{type(model).__name__} is trained by DeepSpeed, which would use the gradients before the noise is added. "
            f"Make the engine for the result of deepspeed.initialize(): PrivacyEngine(model_engine, ...)."
        )
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ConfigurationError(
            "nn.DataParallel runs copies of the modules in threads, which dpshard does not see. Start a process for "
            "each GPU, and wrap the model in DistributedDataParallel (see docs/sharding.md)."
        )
    if not dist.is_available() or not dist.is_initialized():
        refuse_foreign_placements(model)
        return local_backend(model)
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from dpshard.backends.ddp import ddp_backend
    from dpshard.backends.fsdp2 import fsdp2_backend

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigurationError(
            "FullyShardedDataParallel (FSDP1) flattens several parameters into one, so dpshard cannot separate "
            "them. Use FSDP2: fully_shard(model), or fsdp_version=2 of accelerate (--fsdp_version 2 of its launcher)."
        )
    if declared is not None and are_stages(declared[1]):
        from dpshard.backends.pipeline import pipeline_backend

        return pipeline_backend(model, declared)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return fsdp2_backend(model, declared)
    if placed_parameters(model) and not isinstance(model, DistributedDataParallel):
        from dpshard.backends.tensor_parallel import tensor_parallel_backend

        return tensor_parallel_backend(model, declared)
    refuse_foreign_placements(model)
    if isinstance(model, DistributedDataParallel):
        return ddp_backend(model, declared)
    return local_backend(model, declared)
