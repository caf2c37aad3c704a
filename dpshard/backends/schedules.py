"""Finds the part of the micro-batch that a stage of torch.distributed.pipelining processes.

A later stage receives only activations. `forward_one_chunk(fwd_chunk_id)`, on the stack, shows their part.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from dpshard.errors import ConfigurationError, LogicalBatchError

PACKAGE = "torch.distributed.pipelining"
_SUPPORTED = ("ScheduleGPipe", "Schedule1F1B")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a micro-batch."""

    index: int
    count: int
    data: bool


def running_chunk(module: nn.Module, group: dist.ProcessGroup) -> Chunk | None:
    """Return the chunk of the forward that begins; None if no backward follows.

    Raise LogicalBatchError outside of a schedule, ConfigurationError for unsupported ones.
    """
    stage, index, schedule = _on_the_stack()
    if stage is None and schedule is None:
        raise LogicalBatchError(
            f"{type(module).__name__} is a stage of a pipeline, and was called outside of its schedule, so the part of "
            f"the micro-batch is unknown. Call schedule.step(...) of ScheduleGPipe or Schedule1F1B; to evaluate, call "
            f"model.eval() or use torch.no_grad()."
        )
    if stage is None or index is None or not stage.has_backward:
        return None
    _require_supported(stage, schedule, module, group)
    _require_gradients_of_inputs(stage, index)
    return Chunk(index, schedule._n_microbatches, bool(stage.is_first))


def _on_the_stack() -> tuple[Any, int | None, Any]:
    stage = index = schedule = None
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(PACKAGE):
            found = frame.f_locals
            if frame.f_code.co_name == "forward_one_chunk":
                stage, index = found["self"], found["fwd_chunk_id"]
            elif module == f"{PACKAGE}.schedules":
                schedule = found.get("self", schedule)
        frame = frame.f_back
    return stage, index, schedule


def _require_supported(stage: Any, schedule: Any, module: nn.Module, group: dist.ProcessGroup) -> None:
    name = type(schedule).__name__
    if name not in _SUPPORTED or not type(schedule).__module__.startswith(PACKAGE):
        raise ConfigurationError(
            f"{name} is not a supported schedule: use {' or '.join(_SUPPORTED)}. (Schedules with several stages a "
            f"rank, or with a backward split in two, call stages in other ways.)"
        )
    if schedule.scale_grads:
        raise ConfigurationError(
            f"{name}(scale_grads=True) divides .grad by the number of its micro-batches, after clipping: the update "
            f"would shrink, while the noise would not. Make it with scale_grads=False; the engine divides by the "
            f"expected batch size."
        )
    if stage.submod is not module:
        raise ConfigurationError(
            f"The stage runs {type(stage.submod).__name__}, and the engine was made for another module. Make the "
            f"engine for the module that PipelineStage gets."
        )
    if stage.dw_builder is not None:
        raise ConfigurationError(
            "PipelineStage(dw_builder=...) computes gradients of parameters by itself, past their clipping. Leave it "
            "out."
        )
    ranks = dist.get_process_group_ranks(stage.group)
    if stage.num_stages != group.size() or ranks != dist.get_process_group_ranks(group):
        raise ConfigurationError(
            f"The pipeline has {stage.num_stages} stages on the ranks {ranks}, but model_parallel_group has the ranks "
            f"{dist.get_process_group_ranks(group)}: stages beyond them would clip by another threshold. Give "
            f"PipelineStage and PrivacyEngine(model_parallel_group=...) one group, with a stage on each of its ranks."
        )


def _require_gradients_of_inputs(stage: Any, index: int) -> None:
    """Raise ConfigurationError unless the stage before gets a gradient.

    Another schedule may have recorded that it needs none.
    """
    received = () if stage.is_first else stage.args_recv_info[index]
    if received and not any(info.tensor_meta.requires_grad for info in received if not info.is_root_arg):
        raise ConfigurationError(
            f"No input that stage {stage.stage_index} of the pipeline receives needs a gradient, so the stages before "
            f"it would train only on noise. Likely causes: another schedule has run on this stage to evaluate (call "
            f"schedule.eval(...) of the schedule that trains), or the stage before detaches its output."
        )
