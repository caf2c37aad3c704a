"""Units and mesh of an FSDP2 model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from dpshard.backends.model_parallel import refuse_foreign_placements
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that FSDP gathers, frees and reduces together."""

    modules: tuple[nn.Module, ...]
    places: tuple[tuple[nn.Module, str, str], ...]
    """(owning module, attribute, name), several for a shared parameter."""
    names: tuple[str, ...]

    @property
    def module(self) -> FSDPModule:
        """The unit's FSDP module."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module

    def reduces(self) -> bool:
        """Return True if this backward reduces gradients."""
        return all(group.reduce_grads for group in self.groups())

    def take_unused(self, *, flag: bool) -> bool:
        """Choose whether FSDP reduces zeros for unused parameters; return the earlier choice.

        FSDP puts them in `.grad`, where they would be gradients without noise.
        """
        groups = [group for group in self.groups() if hasattr(group, "reduce_scatter_unused_params")]
        before = any(group.reduce_scatter_unused_params for group in groups)
        for group in groups:
            group.reduce_scatter_unused_params = flag
        return before

    def groups(self) -> list[Any]:
        """FSDP's groups of parameters, gathered one by one."""
        return _groups(self.modules[0])

    def is_sharded(self) -> bool:
        """Return True if no parameter is unsharded."""
        return all(group.is_sharded for group in self.groups())


def _groups(module: nn.Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def mesh_of(
    model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> tuple[DeviceMesh, int, dict[str, tuple[DeviceMesh, Any]]]:
    """Return FSDP's mesh, its sharded dimension, and tensor parallelism's mesh and placements."""
    whole = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if whole:
        raise ConfigurationError(
            f"{whole[0]} is not sharded, so its copies on the ranks would drift apart. Call fully_shard on the root "
            f"module too."
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    placed = [p for unit in units for group in _groups(unit) for p in group.fsdp_params if _is_placed_by_fsdp(p)]
    refuse_foreign_placements(model, {id(p.sharded_param) for p in placed})
    trained = [p for p in placed if p.sharded_param.requires_grad] or placed
    # By value: without mesh=, each fully_shard makes its own mesh.
    meshes = {(p.mesh_info.mesh, p.mesh_info.shard_mesh_dim) for p in trained}
    if len(meshes) != 1:
        raise ConfigurationError("The parameters live on several device meshes; shard all units over one mesh.")
    ((mesh, shard_dim),) = meshes
    known = {id(p.sharded_param): p for p in placed}
    for name, p in parameters.items():
        assert isinstance(p, DTensor)
        by_fsdp = p.placements[:-1] if known[id(p)].is_dtensor else p.placements
        if known[id(p)].fsdp_placement != Shard(0) or len(by_fsdp) != mesh.ndim:
            raise ConfigurationError(
                f"{name} is placed as {p.placements}. dpshard supports parameters that FSDP has sharded along "
                f"dimension 0, and replicated over nodes (HSDP)."
            )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ConfigurationError("A hybrid-sharded mesh needs names: init_device_mesh(..., mesh_dim_names=...).")
    return mesh, shard_dim, {name: _of_model(name, known[id(p)]) for name, p in _in_parts(model, known)}


def _in_parts(model: nn.Module, known: Mapping[int, Any]) -> Iterator[tuple[str, DTensor]]:
    for name, p in model.named_parameters():
        if id(p) in known and known[id(p)].is_dtensor:
            yield canonical_name(name), p  # type: ignore[misc]


def _of_model(name: str, parameter: Any) -> tuple[DeviceMesh, Any]:
    known = hasattr(parameter, "_unsharded_dtensor_spec")
    spec = parameter._unsharded_dtensor_spec if known else parameter._tp_spec  # of torch 2.11
    p, mesh = parameter.sharded_param, spec.mesh
    _refuse_uneven(name, p, p.placements[-1])
    return mesh, p.placements[-1]


def _refuse_uneven(name: str, parameter: DTensor, placement: Any) -> None:
    ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    if placement.is_shard() and parameter.shape[placement.dim] % ranks:
        raise ConfigurationError(
            f"{name}: dimension {placement.dim} of {tuple(parameter.shape)} has no equal parts on {ranks} ranks, so "
            f"the place of a rank's rows in the whole is unknown. Choose a size that {ranks} divides."
        )


def _is_placed_by_fsdp(parameter: Any) -> bool:
    """Return True if FSDP shards or replicates over every dimension of the mesh, except perhaps the last.

    Placements do not show it: a norm of a tensor-parallel model has those of HSDP.
    """
    mesh, info = parameter.sharded_param.device_mesh, parameter.mesh_info
    own = {info.shard_mesh_dim, info.replicate_mesh_dim} - {None}
    if own != set(range(info.mesh.ndim)) or getattr(info, "is_spmd_mesh", False):
        return False
    return mesh.ndim == info.mesh.ndim + 1 if parameter.is_dtensor else mesh == info.mesh


def units_of(model: nn.Module, names: Mapping[int, str]) -> Iterator[Unit]:
    """Yield the FSDP units, outermost first."""
    modules: dict[int, list[nn.Module]] = {}
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule):
            unit = id(module._get_fsdp_state())
            modules[unit] = [*modules.pop(unit, []), module]
    taken: set[int] = set()
    found: list[Unit] = []
    for unit in modules.values():
        places = []
        for owner in dict.fromkeys(owner for module in unit for owner in module.modules()):
            for attribute, parameter in owner._parameters.items():
                if parameter is not None and id(parameter) in names and id(parameter) not in taken:
                    places.append((owner, attribute, names[id(parameter)]))
        taken.update(id(owner._parameters[attribute]) for owner, attribute, _ in places)
        found.append(Unit(tuple(unit), tuple(places), tuple(dict.fromkeys(name for _, _, name in places))))
    yield from reversed(found)
