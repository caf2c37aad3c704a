"""Checks of DeepSpeed's settings; restores torch's F.linear, which ZeRO-3 replaces in the whole process."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dpshard.errors import ConfigurationError, UnsupportedOptimizerError
from dpshard.names import is_compiled

_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # the original F.linear

_TESTED = (0, 19)

_KNOWN = ("DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3")
"""DeepSpeed's optimizers with a known layout."""


def is_model_engine(model: nn.Module) -> bool:
    """Return True for a DeepSpeedEngine; does not import DeepSpeed."""
    return any(
        kind.__name__ == "DeepSpeedEngine" and kind.__module__.partition(".")[0] == "deepspeed"
        for kind in type(model).__mro__
    )


def is_managed(model: nn.Module) -> bool:
    """Return True if DeepSpeed has partitioned parameters."""
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters())


def refuse_unsupported(model_engine: Any) -> int:
    """Return the ZeRO stage (1, 2 or 3); raise ConfigurationError for settings that are not private or exact."""
    version = metadata.version("deepspeed")
    if tuple(map(int, version.split(".")[:2])) < _TESTED:
        raise ConfigurationError(
            f"DeepSpeed {version} is older than {'.'.join(map(str, _TESTED))}, the oldest version with known "
            f"partitions and hooks. Install a newer one."
        )
    stage = int(model_engine.zero_optimization_stage())
    for reason in _reasons(model_engine, stage):
        raise ConfigurationError(f"DeepSpeed: {reason}")
    _refuse_optimizer(model_engine.optimizer.optimizer)
    require_no_accumulation(model_engine)
    return stage


def require_no_accumulation(model_engine: Any) -> None:
    """Raise ConfigurationError unless DeepSpeed leaves losses undivided."""
    steps = model_engine.gradient_accumulation_steps()
    if steps != 1:
        raise ConfigurationError(
            f'DeepSpeed: "gradient_accumulation_steps": {steps} divides every loss by {steps} before gradients are '
            f"clipped, and Poisson batches have no fixed number of micro-batches. Set it to 1: micro-batches "
            f"accumulate by themselves until model_engine.step()."
        )


def _reasons(engine: Any, stage: int) -> list[str]:
    zero = engine.optimizer
    found = []
    if engine.pipeline_parallelism:
        found.append(
            "a PipelineEngine runs forward and backward by itself, stage by stage. Use ZeRO without a pipeline."
        )
    if engine.has_moe_layers:
        found.append(
            "MoE layers of DeepSpeed route samples of all ranks to shared experts, up to a capacity, so samples have "
            "no gradients of their own."
        )
    if any(isinstance(module, DistributedDataParallel) for module in engine.module.modules()):
        found.append(
            "the model is in DistributedDataParallel, which would reduce gradients beside ZeRO. Hand the model itself "
            "to deepspeed.initialize()."
        )
    if any(p.is_complex() for p in engine.module.parameters()):
        found.append(
            "its partitions hold only real numbers, but a parameter is complex. Store it as real numbers [..., 2], "
            "and call torch.view_as_complex in forward; or use DDP or FSDP2."
        )
    if max(engine.mp_world_size, engine.sequence_parallel_size) > 1:
        found.append("tensor and sequence parallelism split one sample over ranks; only data parallelism is supported.")
    if stage not in (1, 2, 3):
        found.append('stage 0 is plain data parallelism. Set "zero_optimization": {"stage": 1}, or use DDP.')
    if engine.fp16_enabled():
        found.append(
            "fp16 scales the loss before gradients are clipped, and drops steps that overflow after their privacy cost "
            "is "
            'charged. Set "fp16": {"enabled": false} and "bf16": {"enabled": true}: bf16 needs no scaling.'
        )
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16:
        found.append('torch_autocast in float16 scales the loss. Set "torch_autocast": {"dtype": "bfloat16"}.')
    if engine.gradient_clipping() != 0:
        found.append(
            f'"gradient_clipping": {engine.gradient_clipping()} (default 1.0) would rescale the gradient by its norm '
            f"before the private gradient replaces it. Set it to 0.0; max_grad_norm clips every sample."
        )
    if engine.is_deepcompile_enabled():
        found.append("DeepCompile rewrites forward and backward. Switch it off, or compile blocks by torch.compile.")
    if stage and type(zero).__name__ not in _KNOWN:
        found.append(
            f"the optimizer is a {type(zero).__name__}; supported are {', '.join(_KNOWN)}, not ZenFlow, SuperOffload "
            f"or MiCS. Pass an optimizer to deepspeed.initialize()."
        )
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    if any(offload is not None and offload.device == "nvme" for offload in offloads):
        found.append("offload to NVMe is not supported; offload to the CPU is.")
    if engine.zero_hpz_partition_size() > 1 or engine.zero_quantized_weights():
        found.append("hpZ partitions and quantized weights (ZeRO++) are not supported; plain ZeRO-3 is.")
    if stage == 3 and any(is_compiled(module) for module in engine.module.modules()):
        found.append("compiled modules do not see the parameters that ZeRO-3 gathers. Use stage 1 or 2, or eager mode.")
    return found


def _refuse_optimizer(optimizer: Any) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizerError(
            f"{kind.__name__} is not a torch.optim.Optimizer, so dpshard cannot see when it steps. Derive it from that "
            f"class."
        )
    if "muon" in kind.__name__.lower():
        raise UnsupportedOptimizerError(
            f"{kind.__name__}: DeepSpeed applies Muon to gradients before the private gradient is in place. Choose "
            f"Adam or AdamW."
        )


def keep_linear() -> None:
    """Restore F.linear of torch, because that of ZeRO-3 hides parameters from rules."""
    partitioning = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partitioning is None:
        return
    partitioning.zero3_linear_wrap = _LINEAR  # type: ignore[attr-defined]  # ZeRO-3 assigns it to F.linear
    if getattr(F.linear, "__name__", "") == "zero3_linear_wrap":
        F.linear = _LINEAR
