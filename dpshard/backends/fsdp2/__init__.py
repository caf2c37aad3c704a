"""FSDP2 (`fully_shard`), 1-D or hybrid. Begin with the note in `reduction.py`."""

from __future__ import annotations

from torch import nn

from dpshard.backends.backend import Backend
from dpshard.backends.fsdp2.reduction import UnitReduction
from dpshard.backends.fsdp2.sharding import FSDP2Sharding
from dpshard.backends.fsdp2.units import Unit
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.grid import Grid
from dpshard.backends.model_parts import DeclaredParts
from dpshard.errors import ConfigurationError

__all__ = ["FSDP2Sharding", "Unit", "UnitReduction", "fsdp2_backend"]


def fsdp2_backend(
    model: nn.Module,
    declared: DeclaredParts | None = None,
    *,
    roles: tuple[type[FSDP2Sharding], type[UnitReduction]] = (FSDP2Sharding, UnitReduction),
) -> Backend:
    """Back-end of a model after `fully_shard`; `declared`: its parts, if any."""
    sharding_of, reduction_of = roles
    sharding = sharding_of(model, declared)
    store = DotGradStore(sharding)
    layout = f"shards on a mesh of {' x '.join(map(str, sharding.mesh.shape))}"
    reduction = reduction_of(sharding, store)
    if sharding.parts is None:
        return Backend(layout, sharding.communicator, sharding, reduction, store)
    try:
        grid = Grid(sharding.data, sharding.parts, sharding.communicator)
    except ConfigurationError:
        sharding.detach()
        raise
    layout = f"{layout}, of parts on {' x '.join(str(axis.size) for axis in reversed(sharding.parts.axes))} ranks"
    return Backend(layout, sharding.communicator, sharding, reduction, store, sharding.data, grid)
