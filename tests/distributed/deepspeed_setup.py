"""DeepSpeed on the CPU for the tests: configurations, engines, and what they have trained."""

import logging
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import Tensor, nn

logger.setLevel(logging.ERROR)
# A C++ extension that DeepSpeed would compile for its collectives on the CPU; gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(stage: int, *flags: str, **changes: Any) -> dict[str, Any]:
    """A configuration for ZeRO `stage`; flags switch single features on."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # All parameters are partitioned, also the small ones; several fp32 partitions a rank.
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 100}
    if "offload" in flags:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if "robin" in flags:
        zero["round_robin_gradients"] = True
    if "overlap" in flags:
        zero |= {"overlap_comm": True, "contiguous_gradients": False, "reduce_scatter": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if "bf16" in flags:
        config["bf16"] = {"enabled": True}
    if "autocast" in flags:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if "predivide" in flags:
        config |= {"gradient_predivide_factor": 4.0, "communication_data_type": "bf16"}
    if "config" in flags:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-2, "torch_adam": True}}
    if "unmanaged" in flags:
        config["managed_gradient_accumulation"] = False
    return config | changes


def start(model: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Any:
    """The model engine."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=config)[0]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, on every rank."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def masters(model: nn.Module) -> dict[str, Tensor]:
    """The fp32 copies of all trainable parameters, whole, on every rank."""
    return {
        name: safe_get_full_fp32_param(p).detach().clone()  # type: ignore[union-attr]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
