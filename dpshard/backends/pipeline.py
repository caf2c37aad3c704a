"""A stage of a pipeline: whole parameters that no other rank holds; see [Note: Stages] in stages.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.backend import Backend
from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.local import DirectReduction
from dpshard.backends.model_parallel import refuse_foreign_placements
from dpshard.backends.model_parts import DeclaredParts, Grid, ModelParts
from dpshard.backends.sharding import Unsharded
from dpshard.backends.stages import Stages
from dpshard.errors import ConfigurationError, UnsupportedParameterError

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState


def pipeline_backend(model: nn.Module, declared: DeclaredParts) -> Backend:
    """Return the back-end of a stage. Raises ConfigurationError for a stage that is sharded or replicated, too."""
    if any(isinstance(module, (DistributedDataParallel, FSDPModule)) for module in model.modules()):
        raise ConfigurationError(
            "A stage of a pipeline in DistributedDataParallel or FSDP2 is not supported: schedules reduce its "
            "gradients at times of their own. Use one or the other."
        )
    refuse_foreign_placements(model)
    sharding, data = StageSharding(model), Communicator()
    everyone, grid = sharding.take_declared(declared, data)
    store = DotGradStore(sharding)
    layout = f"stages on {everyone.world_size} ranks"
    return Backend(layout, everyone, sharding, DirectReduction(store), store, data, grid)


class StageSharding(Unsharded):
    """The parameters of one stage; clipped sums go to `.grad` directly, since some come after backward."""

    parts: Stages

    @property
    def passes_rows(self) -> bool:
        """See ShardingHooks."""
        return True

    def _parts_and_ranks(self, declared: DeclaredParts, data: Communicator) -> tuple[ModelParts, Any]:
        return Stages(declared[0], self.device, self.parameters), Grid

    def training_state(self, optimizer: Any) -> TrainingState:
        """See Sharding."""
        from dpshard.backends.staged_state import StagedState  # late: only checkpoints need it

        return StagedState(self.outermost, optimizer, self.names, self.parts)

    @property
    def everywhere(self) -> Sequence[Any]:
        """See Sharding."""
        return self.parts.everywhere

    @property
    def elements(self) -> int:
        """Number of real trainable numbers on all stages."""
        return sum(math.prod(shape) * (1 + is_complex) for _, shape, _, is_complex in self.parts.everywhere)

    def _accumulated(self, name: str, _: object = None) -> None:
        # Autograd calls this without a gradient too, because sums go to `.grad` directly.
        if not self.guard.is_untouched(name):
            raise UnsupportedParameterError(f"{name}: a gradient reached it that is not clipped.")
