"""A stage of a pipeline; see [Note: Stages] in stages.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.backend import Backend
from dpshard.backends.communicator import Communicator
from dpshard.backends.ddp import refuse_other_reductions
from dpshard.backends.fsdp2 import fsdp2_backend
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.grid import Grid
from dpshard.backends.model_parallel import refuse_foreign_placements
from dpshard.backends.model_parts import DeclaredParts, ModelParts
from dpshard.backends.sharding import Unsharded
from dpshard.backends.stage_shards import LateUnits, StageShards
from dpshard.backends.stage_sums import SilentReducer, WholeSums
from dpshard.backends.stages import OfStages, Stages
from dpshard.errors import ConfigurationError


def pipeline_backend(model: nn.Module, declared: DeclaredParts) -> Backend:
    """Back-end of a stage, or of its replica or shard."""
    modules = list(model.modules())
    sharded = any(isinstance(module, FSDPModule) for module in modules)
    if any(isinstance(module, DistributedDataParallel) and (sharded or module is not model) for module in modules):
        raise ConfigurationError(
            "A stage of a pipeline with parts in DistributedDataParallel, or with FSDP2 in it, is not supported. Wrap "
            "the whole stage in DistributedDataParallel(stage, process_group=...) over the ranks with the same stage, "
            "or shard all of it by fully_shard(..., mesh=...)."
        )
    if sharded:
        return fsdp2_backend(model, declared, roles=(StageShards, LateUnits))
    refuse_foreign_placements(model)
    if isinstance(model, DistributedDataParallel):
        refuse_other_reductions(model)
        group = model.process_group
        sharding: StageSharding = StageReplica(model)
        data = Communicator(dist.get_world_size(group), lambda: group, sharding.device)
    else:
        sharding, data = StageSharding(model), Communicator()
    everyone, grid = sharding.take_declared(declared, data)
    store = DotGradStore(sharding)
    layout = f"stages on {everyone.world_size // data.world_size} ranks"
    layout += f", in {data.world_size} replicas" if data.world_size > 1 else ""
    return Backend(layout, everyone, sharding, WholeSums(sharding, store, data), store, data, grid)


class StageSharding(OfStages, Unsharded):
    """Parameters of one stage; some sums come after backward, so all go to `.grad` directly."""

    accumulates = True
    unclipped = (
        "a gradient reached it that is not clipped. Use it only in the forward of this stage, and call "
        "schedule.step(...)."
    )

    def _parts_and_ranks(self, declared: DeclaredParts, data: Communicator) -> tuple[ModelParts, Any]:
        return Stages(declared[0], self.device, self.parameters), Grid


class StageReplica(StageSharding):
    """A stage in DistributedDataParallel."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model.module, model)
        self._reducer = SilentReducer(model)

    def detach(self) -> None:
        """Restore the parameters and the reducer."""
        self._reducer.restore()
        super().detach()
