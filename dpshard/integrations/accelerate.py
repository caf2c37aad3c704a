"""accelerate: an engine for what `accelerator.prepare` returns, plain, under DDP, or sharded by FSDP2.

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

from accelerate import Accelerator
from accelerate.utils import DistributedType
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
    """An engine for the prepared `model`, whose state is in `accelerator.save_state` and `load_state` from now on.

    `settings` are those of `dpshard.PrivacyEngine`. Data loaders are not prepared: `engine.batches` gives each process
    its share. Raises ConfigurationError for an accelerator that would change gradients, or hide them.
    """
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
            f"Accelerator on {accelerator.distributed_type.value} is not supported: use FSDP2, or DDP; for DeepSpeed, "
            f"deepspeed.initialize() and dpshard's own loop."
        )
    engine = PrivacyEngine(model, **settings)
    accelerator.register_for_checkpointing(engine)
    return engine
