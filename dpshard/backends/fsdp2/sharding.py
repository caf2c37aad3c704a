"""Parameters sharded by `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from dpshard.backends.communicator import Communicator, all_ranks
from dpshard.backends.crossed_parts import placed_as, placed_parts
from dpshard.backends.fsdp2.gathers import Gathers
from dpshard.backends.fsdp2.units import Unit, mesh_of, units_of
from dpshard.backends.model_parts import DeclaredParts, ModelParts, Place
from dpshard.backends.sharding import Sharding
from dpshard.backends.slices import Slices, crossing
from dpshard.errors import ConfigurationError


class FSDP2Sharding(Sharding):
    """Parameters that are DTensors, sharded over one dimension of a mesh."""

    unclipped = (
        "FSDP reduced a gradient that is not clipped. It comes from a backward under "
        "set_requires_gradient_sync(False), or from a use of the parameter after unshard() or in a method of "
        "register_fsdp_forward_method(). Call zero_grad(), and use parameters only in forward."
    )

    def __init__(self, model: nn.Module, declared: DeclaredParts | None = None) -> None:
        super().__init__(model, model)
        self._gathers = Gathers()
        try:
            self.mesh, self.shard_dim, of_model = mesh_of(model, self.parameters)
            self.parts = self._parts_of(of_model, declared)
            self.units = list(units_of(model, {id(p): name for name, p in self.parameters.items()}))
            for unit in self.units:
                self._refuse_mixed(unit)
        except ConfigurationError:
            self.detach()
            raise
        self._parts = self._split()
        self._unit_of_module = {module: unit for unit in self.units for module in unit.modules}
        self.whole: dict[str, Tensor] = dict(self.parameters)
        """Unsharded parameters, as last seen in forward."""
        self._unsharded: dict[str, set[Tensor]] = {}
        self._seen: set[Tensor] = set()
        self.differentiated: Mapping[str, Tensor] = self.whole
        self.data = Communicator(self.mesh.size(), self._group, self.compute_device)
        self.communicator = self.data if self.parts is None else all_ranks(self.compute_device)
        self._data_group: dist.ProcessGroup | None = None
        self.data_shape: tuple[int, ...] = tuple(self.mesh.shape)
        if self.parts is not None and declared is not None:
            try:
                self._slice(self.parts.terms)
            except ConfigurationError:
                self.detach()
                raise
        self._gathers.watch(group for unit in self.units for group in unit.groups())

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the whole parameters."""
        parts = self.parts
        shapes = super().shapes
        if parts is None or not parts.plain:
            return shapes
        return {name: parts.whole_shape(name, shape) for name, shape in shapes.items()}

    def _parts_of(
        self, of_model: Mapping[str, tuple[DeviceMesh, Any]], declared: DeclaredParts | None
    ) -> ModelParts | None:
        if not of_model:
            return None if declared is None else ModelParts.declared(declared, self.parameters, self.compute_device)
        meshes = {mesh for mesh, _ in of_model.values()}
        if len(meshes) > 1:
            raise ConfigurationError(
                "Parameters are in parts on several meshes: give parallelize_module one mesh of one dimension for all."
            )
        for name, (_, placement) in of_model.items():
            if type(placement) not in (Shard, Replicate):
                raise ConfigurationError(f"{name} is placed as {placement} by tensor parallelism; that has no rule.")
        (mesh,) = meshes
        cut = {name: placement.dim for name, (_, placement) in of_model.items() if placement.is_shard()}
        return placed_parts(mesh, self.compute_device, cut, self.parameters, declared)

    def _slice(self, parts: ModelParts) -> None:
        """Let the ranks of a model divide sums as FSDP divides parameters; see [Note: A reduction in two levels].

        If FSDP's mesh has ranks of one model, all parameters must be terms, and these ranks evenly spaced.
        """
        chunks, ranks = self.shard_mesh.size(), self.mesh.mesh.flatten().tolist()
        of_model = dist.get_process_group_ranks(parts.group)
        if not set(of_model) <= set(ranks):
            parts.slices = Slices(parts.group, chunks, self.rows)
            return
        places = crossing(self.shard_mesh.mesh.tolist(), of_model)
        in_order = ranks == sorted(ranks)  # as a group orders them
        if places is None or not in_order or not all(map(parts.is_termwise, self.parameters)):
            raise ConfigurationError(
                "fully_shard has a mesh with ranks that hold one model. That is supported for context parallelism, "
                "where all parameters are 'sum' and no replicas of HSDP hold one model. Make init_device_mesh with the "
                "dimensions data and model, and fully_shard on both, flattened; or fully_shard only on data."
            )
        parts.slices = Slices(parts.group, chunks, self.rows, step=places[1][0] - places[0][0])
        parts.spread = True
        own = places[parts.rank]
        self._data_group = self._group_of([self.shard_mesh.mesh.tolist()[place] for place in own])
        self.data_shape = tuple(n if dim != self.shard_dim else len(own) for dim, n in enumerate(self.mesh.shape))
        everyone = self.mesh.mesh.index_select(self.shard_dim, torch.tensor(own)).flatten().tolist()
        data = self._data_group if self.mesh.ndim == 1 else self._group_of(everyone)
        self.data = Communicator(len(everyone), lambda: data, self.compute_device)

    @staticmethod
    def _group_of(ranks: list[int]) -> dist.ProcessGroup:
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _refuse_mixed(self, unit: Unit) -> None:
        complex_ones = [name for name in unit.names if self.parameters[name].is_complex()]
        if complex_ones and len(complex_ones) < len(unit.names):
            raise ConfigurationError(
                f"{complex_ones[0]} is complex, but FSDP gathers parameters of one dtype together. Call fully_shard on "
                f"the module that owns it, without real parameters; or store it as real numbers [..., 2], and call "
                f"torch.view_as_complex in forward."
            )

    @property
    def compute_device(self) -> torch.device:
        """Device of the forwards; shards may be offloaded."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")

    def _group(self) -> dist.ProcessGroup:
        return self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh._flatten().get_group()

    def _is_known(self, name: str, parameter: nn.Parameter) -> bool:
        # FSDP swaps a module's attributes during its forward.
        return self.parameters.get(name) is parameter or parameter in self._seen

    def tensors_of(self, name: str) -> Sequence[Tensor]:
        """Unsharded tensors of a parameter, which FSDP may shard in several modules."""
        return tuple(self._unsharded.get(name, ())) or (self.whole[name],)

    # --- forward

    def unshards(self, module: nn.Module) -> bool:
        """Return True after `fully_shard(module)`."""
        return isinstance(module, FSDPModule)

    def unshard_module(self, module: nn.Module) -> None:
        """Unshard the parameters of `module` now."""
        assert isinstance(module, FSDPModule)
        module.unshard()

    def unsharded_parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield names and unsharded parameters of a unit."""
        unit = self._unit_of_module.get(module)
        for owner, attribute, name in unit.places if unit is not None else ():
            parameter = owner._parameters[attribute]
            assert parameter is not None
            if parameter not in self._seen:
                self._seen.add(parameter)
                self._unsharded.setdefault(name, set()).add(parameter)
                self.guard.watch(name, parameter.requires_grad_())
            self.whole[name] = parameter
            # FSDP makes it once, and ignores the sharded parameter's later requires_grad.
            parameter.requires_grad_(self.parameters[name].requires_grad)
            yield name, parameter

    @property
    def gathers(self) -> tuple[int, int]:
        """The first of the ranks that gather together, and a digest of this rank's gathers."""
        return min(dist.get_process_group_ranks(self.shard_mesh.get_group())), self._gathers.digest

    def gather_anew(self) -> None:
        """Free gathered parameters, which may be wrong, and begin another digest."""
        self._gathers.digest = 0
        for unit in self.units:
            unit.module.reshard()

    def _together(self) -> AbstractContextManager[Any]:
        self.communicator.meet()  # in a probe all ranks unshard together
        return nullcontext()

    def _isolated(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for unit in self.units:
            if unit.is_sharded():
                # A forward leaves the root unsharded; an optimizer made then would hold tensors that FSDP frees.
                stack.callback(unit.module.reshard)
        return stack

    def detach(self) -> None:
        """Remove every trace from the parameters."""
        self._gathers.detach()
        super().detach()

    # --- shards

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of the ranks with different shards."""
        return self._parts[self.shard_dim]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Data ranks with different shards."""
        return self._data_group or self.shard_mesh.get_group()

    def replica_groups(self) -> Iterator[dist.ProcessGroup]:
        """Yield groups with equal shards (HSDP)."""
        for dim, part in enumerate(self._parts):
            if dim != self.shard_dim:
                yield part.get_group()

    def _split(self) -> list[DeviceMesh]:
        if self.mesh.ndim == 1:
            return [self.mesh]
        names = self.mesh.mesh_dim_names
        assert names is not None
        return [self.mesh[name] for name in names]

    def rows(self, name: str) -> int:
        """Rows of a padded shard; the last ranks hold fewer."""
        return -(-self._part_shape(name)[0] // self.shard_mesh.size())

    def _part_shape(self, name: str) -> torch.Size:
        shape = self.parameters[name].shape
        return shape if self.parts is None or self.parts.plain else self.parts.part_shape(name, shape)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's shard."""
        return x.to_local() if isinstance(x, DTensor) else x

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole of a DTensor."""
        whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
        return self.parts.joined(name, whole) if self.parts is not None and self.parts.plain else whole

    def place(self, name: str) -> Place:
        """Place of this rank's part in the flattened parameter."""
        first = min(self._part_shape(name)[0], self.rows(name) * self.shard_mesh.get_local_rank())
        shape = self.parameters[name].shape
        if self.parts is None:
            return Place(first * shape[1:].numel())
        return self.parts.place(name, self.parts.whole_shape(name, shape) if self.parts.plain else shape, first)

    def assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put this rank's part in `.grad`."""
        assert isinstance(parameter, DTensor)
        parameter.grad = placed_as(parameter, gradient)

    def over_shards(self, x: Tensor) -> Tensor:
        """Sum over different shards of the data ranks."""
        x = x.to(self.compute_device)
        dist.all_reduce(x, group=self.shard_group)
        return x
