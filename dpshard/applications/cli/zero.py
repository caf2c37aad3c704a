"""DeepSpeed for `dpshard train`: exact configuration, quiet start, final weights."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpshard.errors import ConfigurationError


def require_deepspeed() -> None:
    """Raise ConfigurationError unless DeepSpeed is installed."""
    if find_spec("deepspeed") is None:
        raise ConfigurationError(
            'DeepSpeed is not installed. Run: pip install --no-build-isolation "dpshard[deepspeed]", or take --shard '
            "fsdp2, which shards parameters, gradients and optimizer state as ZeRO-3 does."
        )


def wrap(model: nn.Module, stage: int, device: torch.device, optimizer: Optimizer) -> Any:
    """Return the DeepSpeedEngine of `model`, in float32, at ZeRO `stage`."""
    deepspeed = _imported(device)
    # See docs/sharding-deepspeed.md. Only samplers and counters use the size of a micro-batch.
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=config)[0]


def weights(model: nn.Module) -> dict[str, Any]:
    """Return whole parameters and buffers on rank 0, gathered one by one."""
    import deepspeed

    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value]):
            if torch.distributed.get_rank() == 0:
                found[name] = value.detach().cpu().clone()
    return found


def _imported(device: torch.device) -> Any:
    # DeepSpeed selects an accelerator during its import, even a GPU that the user excluded.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed would compile this C++ extension for CPU collectives; gloo does not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
