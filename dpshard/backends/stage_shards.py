"""A stage of a pipeline in FSDP2; see [Note: Sums of a stage] in stage_sums.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpshard.backends.fsdp2 import FSDP2Sharding, Unit, UnitReduction
from dpshard.backends.grad_store import add
from dpshard.backends.model_parts import DeclaredParts
from dpshard.backends.roles import Take
from dpshard.backends.stage_sums import LateSums
from dpshard.backends.stages import OfStages, Stages
from dpshard.errors import ConfigurationError, DpshardError, LogicalBatchError, UnsupportedParameterError

_EVALUATED = (
    " Or schedule.eval(...) has run between two micro-batches: torch infers shapes there, and clears the gradients of "
    "FSDP2's modules. Evaluate after optimizer.step()."
)


class StageShards(OfStages, FSDP2Sharding):
    """The shards of one stage."""

    def _parts_of(self, of_model: Mapping[str, tuple[DeviceMesh, Any]], declared: DeclaredParts | None) -> Stages:
        if of_model:
            raise ConfigurationError(
                f"Tensor parallelism within a stage of a pipeline is not supported: parallelize_module has placed "
                f"{next(iter(of_model))}. Shard stages by fully_shard alone."
            )
        if self.mesh.ndim > 1:
            raise ConfigurationError(
                "Hybrid sharding (HSDP) within a stage of a pipeline is not supported. Call fully_shard with a mesh of "
                "one dimension: all ranks with the same stage."
            )
        assert declared is not None
        if len({*self.mesh.mesh.flatten().tolist()} & {*dist.get_process_group_ranks(declared[0])}) > 1:
            raise ConfigurationError(
                "fully_shard has a mesh with ranks of other stages of this pipeline, which hold other parameters. Give "
                "it the mesh of the ranks with the same stage: the dimension of init_device_mesh that is not the "
                "pipeline's, as in fully_shard(stage, mesh=mesh['dp'])."
            )
        self.guard.other_cause = _EVALUATED
        return Stages(declared[0], self.compute_device, self.parameters)

    def _together(self) -> AbstractContextManager[Any]:
        self.data.meet()  # not all ranks: another stage begins later
        return nullcontext()


class LateUnits(UnitReduction, LateSums):
    """Reduces all units after each step of the schedule."""

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Keep the clipped sums until `end_micro_batch`; return None for each."""
        self._store.begins(lambda: None)
        self.add(names, take)
        return [None] * len(names)

    def add(self, names: Sequence[str], take: Take) -> None:
        """Keep clipped sums."""
        self._store.require_untouched(names)
        for name in names:
            total = take(name)
            if total is not None:
                add(self._store.unreduced, name, total)
                self._store.stand_in(name)

    def end_micro_batch(self) -> None:
        """Reduce all units, in one order."""
        self._begin_pass()
        self._end()

    def _reduces(self, unit: Unit) -> bool:
        # Schedules switch FSDP's reduction off and on.
        return True

    def _add_shards(self, unit: Unit, shards: Tensor) -> None:
        try:
            super()._add_shards(unit, shards)
        except (LogicalBatchError, UnsupportedParameterError) as error:
            self._late_fault = error  # raised later: other ranks wait in the next reductions

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        if self._store.unreduced:
            return LogicalBatchError(
                f"The clipped sum of {next(iter(self._store.unreduced))} came after those of its micro-batch were "
                f"summed over ranks. Call schedule.step(...) within the loop over engine.batches(...), and zero_grad() "
                f"to start afresh."
            )
        return self._late_fault or super().fault()
