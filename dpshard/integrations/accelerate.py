"""accelerate: an engine for a prepared model, plain, under DDP, or sharded by FSDP2.

model, optimizer = accelerator.prepare(model, optimizer)
engine = make_engine(accelerator, model, batch_size=256, ...)
for logical_batch in engine.batches(dataset, micro_batch_size=32):
    for batch in logical_batch:
        batch = send_to_device(batch, accelerator.device)
        accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError

_DISTRIBUTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.FSDP,
)


def make_engine(accelerator: Accelerator, model: nn.Module, **settings: Any) -> PrivacyEngine:
    """Return an engine for the prepared `model`; `settings` go to `dpshard.PrivacyEngine`.

    `accelerator.save_state` and `load_state` include its state. Do not prepare data loaders: `engine.batches` gives
    each process its share. Raises ConfigurationError if the accelerator would change or hide gradients.
    """
    require_supported(accelerator)
    engine = PrivacyEngine(model, **settings)
    accelerator.register_for_checkpointing(engine)
    return engine


def require_supported(accelerator: Accelerator) -> None:
    """Raise ConfigurationError unless gradients and samples stay as they are."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigurationError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) divides losses before "
            f"gradients are clipped, and skips steps. Leave it out: the loop over micro-batches accumulates."
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigurationError(
            "Accelerator(mixed_precision='fp16') scales losses, and so gradients before they are clipped. Use 'bf16'."
        )
    if accelerator.distributed_type not in _DISTRIBUTED:
        raise ConfigurationError(
            f"Accelerator on {accelerator.distributed_type.value} is not supported: use FSDP2 or DDP. For DeepSpeed, "
            f"use deepspeed.initialize() and dpshard's own loop."
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ConfigurationError(
            f"ParallelismConfig(tp_size={parallelism.tp_size}, cp_size={parallelism.cp_size}, "
            f"sp_size={parallelism.sp_size}) lets several processes share a sample, but private training needs whole "
            f"samples. Leave all of them at 1."
        )


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard on several CPU processes, where accelerate would use DDP."""
    if accelerator.distributed_type is not DistributedType.MULTI_CPU:
        return
    state = accelerator.state
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    state.fsdp_plugin = plugin
    # As AcceleratorState does: later instances read the shared state.
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
