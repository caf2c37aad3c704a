"""`parallelize_module` without FSDP: parameters are DTensors, on one data rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpshard.backends.backend import Backend
from dpshard.backends.communicator import Communicator, all_ranks
from dpshard.backends.crossed_parts import placed_as, placed_parts
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.grid import Grid
from dpshard.backends.local import DirectReduction
from dpshard.backends.model_parts import DeclaredParts, ModelParts
from dpshard.backends.sharding import Unsharded
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

_PLACED = (
    "dpshard supports parameters that parallelize_module places as Shard or Replicate on one mesh of one dimension, "
    "alone or under fully_shard on the other dimensions of the mesh (see docs/model-parallel.md)"
)


def tensor_parallel_backend(model: nn.Module, declared: DeclaredParts | None = None) -> Backend:
    """Back-end of a model after `parallelize_module`."""
    parts = parts_of({canonical_name(name): p for name, p in model.named_parameters()}, declared)
    data, everyone = Communicator(), all_ranks(parts.device)
    sharding = PlacedSharding(model, parts=parts, together=everyone.meet)
    store = DotGradStore(sharding)
    layout = f"tensor-parallel parts on {' x '.join(str(axis.size) for axis in reversed(parts.axes))} ranks"
    try:
        grid = Grid(data, parts, everyone)
    except ConfigurationError:
        sharding.detach()
        raise
    return Backend(layout, everyone, sharding, PlacedReduction(store), store, data, grid)


def parts_of(placed: Mapping[str, Any], declared: DeclaredParts | None = None) -> ModelParts:
    """Parts of a model of DTensors on one mesh, and whole tensors."""
    meshes: list[DeviceMesh] = []
    cut: dict[str, int] = {}
    for name, p in placed.items():
        if not isinstance(p, DTensor):
            continue
        if p.device_mesh not in meshes:
            meshes.append(p.device_mesh)
        placement = p.placements[0]
        plain = type(placement).__name__ in ("Shard", "Replicate")
        if len(meshes) > 1 or len(p.placements) != 1 or not plain:
            raise ConfigurationError(f"{name} is placed as {p.placements} on {p.device_mesh}. {_PLACED}.")
        if placement.is_shard():
            cut[name] = placement.dim % p.dim()  # type: ignore[attr-defined]
    (mesh,) = meshes
    held = {name: p.to_local() for name, p in placed.items() if isinstance(p, DTensor)}
    parts = placed_parts(mesh, next(iter(held.values())).device, cut, placed, declared)
    for name, part in held.items():
        if part.shape != parts.part_shape(name, placed[name].shape):
            raise ConfigurationError(f"{name} has parts of other sizes than torch.chunk makes. {_PLACED}.")
    return parts


class PlacedSharding(Unsharded):
    """Parameters; some are DTensors."""

    accumulates = True
    unclipped = "a gradient reached it that is not clipped."

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the whole parameters."""
        return {name: p.shape for name, p in self.parameters.items()}

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part."""
        return x.to_local() if isinstance(x, DTensor) else x

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole of a DTensor."""
        return shard.full_tensor() if isinstance(shard, DTensor) else shard

    def assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put this rank's part in `.grad`."""
        parameter.grad = placed_as(parameter, gradient) if isinstance(parameter, DTensor) else gradient


class PlacedReduction(DirectReduction):
    """Puts the sums of a rank's parts in `.grad`."""

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True: every forward communicates."""
        return True
