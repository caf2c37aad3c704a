"""Refuses ranks that hold parts of one model or of one sample.

[Note: Parts of a sample] With an undeclared part of its gradient, a sample counts for more than R. The engine refuses
- ranks that do not share the data, and whose role is unknown (`require_all_ranks`);
- parameters that were not placed by FSDP (`refuse_foreign_placements`);
- a forward called by a pipeline schedule (`whole_samples`);
- a forward, or a backward in verification, that communicates or computes on tensors split over ranks (`whole_samples`).
  It does not detect messages outside torch.distributed, or in the backward of operations that the loop adds. Nor does
  it in a branch that uses parameters as another branch does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

_KINDS = "tensor, pipeline, context or expert parallelism"
_TODAY = (
    "dpshard trains whole models on whole samples, sharded by DistributedDataParallel, FSDP2, HSDP or DeepSpeed's ZeRO "
    "over all ranks, and parts of models and samples that parallelize_module or model_parallel_parts declares (see "
    "docs/model-parallel.md)"
)

_NAMESPACES = frozenset(
    {"c10d", "_dtensor", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
_SILENT = ("barrier", "wait_tensor", "_wrap_tensor_autograd")
"""Of these, operators that transfer no data."""
_FRAMEWORKS = (
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "deepspeed.runtime",
    "dpshard.backends",
)
"""Modules that communicate around a forward."""
_MODULE_CALL = "torch.nn.modules.module"
_PIPELINES = ("torch.distributed.pipelining", "deepspeed.runtime.pipe")


def processes() -> int:
    """Return the number of processes of the default group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_known_group(group: Any, declared: Any) -> None:
    """Raise ConfigurationError unless `group` is None, contains only this rank, or has declared parts."""
    if group is None:
        if declared is not None:
            raise ConfigurationError(
                "model_parallel_parts says which parts of the model ranks hold, but not which ranks: give "
                "model_parallel_group, too. (DTensors of parallelize_module show both by themselves.)"
            )
        return
    if processes() == 1 or not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"model_parallel_group={group!r} must be a torch.distributed.ProcessGroup that contains this rank, or None."
        )
    if group.size() > 1 and not isinstance(declared, Mapping):
        raise ConfigurationError(
            f"model_parallel_group has {group.size()} ranks, which hold parts of one model: declare them by "
            f"model_parallel_parts={{'*.up.weight': 0, '*.down.weight': 1, '*': 'same'}} (see "
            f"docs/model-parallel.md). Pass a group of only this rank if other ranks train other models."
        )


def require_all_ranks(model: nn.Module, world_size: int, *, model_parallel_group: Any = None) -> None:
    """Raise ConfigurationError unless all ranks share the data, or a group explains the rest."""
    if model_parallel_group is None and world_size < processes():
        raise ConfigurationError(
            f"{world_size} of {processes()} ranks share the data of this {type(model).__name__}, and the role of the "
            f"others is unknown. If the model is not distributed yet, wrap it in DistributedDataParallel, or call "
            f"fully_shard on it, and make the engine for the result. (Compile before you wrap: "
            f"DistributedDataParallel(torch.compile(model)).) If ranks hold parts of one model or of "
            f"one sample ({_KINDS}), declare it by model_parallel_group and model_parallel_parts. {_TODAY}. "
            f"If they train other models, start each training by its own launcher, or pass a group of only this rank: "
            f"model_parallel_group=torch.distributed.new_subgroups(group_size=1)[0]."
        )


def refuse_later_group(then: int) -> None:
    """Raise ConfigurationError if a process group has come since the engine was made, among `then` processes."""
    if processes() > then:
        raise ConfigurationError(
            f"The engine was made before torch.distributed.init_process_group(), for one process, and now there are "
            f"{processes()}. Each would draw its own batches, with its own noise and ledger, and none would count the "
            f"releases of the others. Call init_process_group() first, then wrap the model, then make the engine."
        )


def placed_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that are DTensors."""
    if "torch.distributed.tensor" not in sys.modules:  # importing it is slow
        return []
    from torch.distributed.tensor import DTensor

    return [canonical_name(name) for name, p in model.named_parameters() if isinstance(p, DTensor)]


def require_one_training(world_size: int) -> None:
    """Raise ConfigurationError unless all ranks train this model."""
    if world_size < processes():
        raise ConfigurationError(
            f"All {processes()} ranks call a Checkpointer together, but only {world_size} of them train this model. "
            f"Save engine.state_dict(), and the states of model and optimizer, in a folder for each training; or start "
            f"each by its own launcher."
        )


def refuse_foreign_placements(model: nn.Module, own: Collection[int] = ()) -> None:
    """Raise ConfigurationError for a DTensor parameter with an address not in `own`."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in own:
            raise ConfigurationError(
                f"{canonical_name(name)} is placed as {parameter.placements} on {parameter.device_mesh}, not by FSDP "
                f"but by tensor or expert parallelism (parallelize_module, distribute_tensor). Then no rank has the "
                f"norm of a whole sample, even if only other parameters are trained. {_TODAY}."
            )


class KnownParts(Protocol):
    """The ranks of one model, as `whole_samples` uses them."""

    group: dist.ProcessGroup
    mesh: Any
    meets: bool
    of_samples: bool

    @property
    def axes(self) -> Sequence[KnownParts]:
        """Dimensions of the grid of these ranks, outermost first."""
        ...


def whole_samples(parts: KnownParts | None, block: str = "forward") -> AbstractContextManager[Any]:
    """Return a context that refuses to share samples beyond `parts`; see [Note: Parts of a sample]."""
    return nullcontext() if processes() == 1 else _watched(parts, block)


@contextmanager
def _watched(parts: KnownParts | None, block: str) -> Iterator[None]:
    from dpshard.backends.collective_mode import CollectiveMode

    stage = parts is not None and not parts.meets
    if not stage:
        _refuse_pipeline(_callers())
    known = [] if parts is None or stage else [(axis.group, axis.mesh) for axis in parts.axes]
    rows_only = parts is not None and parts.of_samples
    refuse = functools.partial(_refuse, block, _OF_EXPERTS if rows_only else "")
    with CollectiveMode(refuse, known, rows_only=rows_only):
        yield


def _refuse_pipeline(callers: Iterator[str]) -> None:
    if any(name.startswith(_PIPELINES) for name in callers):
        raise ConfigurationError(
            f"This forward belongs to a stage of a pipeline, which holds a part of the model. But the engine takes it "
            f"for a whole model. Give it model_parallel_group=GROUP and model_parallel_parts={{'*': 'stage'}}, "
            f"on every rank of a torch.distributed.pipelining schedule. DeepSpeed's pipelines are not supported. "
            f"{_TODAY}."
        )


def _callers() -> Iterator[str]:
    """Yield modules of the stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _refuse(block: str, advice: str, namespace: str, operator: str, in_parts: bool) -> None:
    talks = namespace in _NAMESPACES and not operator.startswith(_SILENT) and not operator.endswith("barrier_")
    if not (talks or in_parts) or _is_of_a_framework():
        return
    what = f"calls {namespace}.{operator}" if talks else "computes on DTensors"
    raise ConfigurationError(
        f"The {block} of the model {what}, so ranks split samples, or mix samples of several ranks. "
        f"Undeclared {_KINDS} is not supported, nor are losses and statistics over all ranks. {_TODAY}. Reduce "
        f"figures for the log outside of the {block}.{advice}"
    )


_OF_EXPERTS = (
    " Experts' ranks, which have other samples, may send each other rows, by all_to_all_single of "
    "torch.distributed._functional_collectives. They may send whole numbers (the counts of these rows), which "
    "nothing adds up on the way."
)


def _is_of_a_framework() -> bool:
    for name in _callers():
        if name.startswith(_FRAMEWORKS) and name not in (__name__, "dpshard.backends.collective_mode"):
            return True
        if name == _MODULE_CALL:
            break
    return False
