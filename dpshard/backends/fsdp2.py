"""FSDP2 (`fully_shard`), 1-D or hybrid: parameters, gradients and noise live in shards.

[Note: From clipped sums to shards]
Anchors differentiate the sharded parameters, whatever the clipping style, and what FSDP reduces stays empty. The
clipped sums of a unit (the parameters that FSDP gathers and frees together) fill one bucket in float32 or wider, and
as soon as the last of them is in, one reduce-scatter takes it to the shards, while the sums of the next unit are
computed. So the collectives are those of FSDP, one a unit, but
- the sum over ranks is a sum, never a mean: the sensitivity is that of the sum;
- nothing is rounded to the dtype of the parameters before the noise is in. FSDP would take the gradients of a bfloat16
  forward in bfloat16, and rounding can move the sum by more than one sample does;
- all ranks reduce all units in one fixed order, also units whose layers did not run here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from dpshard.backends.collectives import from_rank_0, meet_for_probe, reduce_scatter
from dpshard.backends.local import WIDE, LocalBackend
from dpshard.backends.model_parallel import refuse_foreign_placements
from dpshard.backends.ranks import stacked
from dpshard.errors import ConfigurationError, DpshardError, LogicalBatchError, UnsupportedParameterError
from dpshard.records import as_real


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One FSDP unit: the parameters that are gathered, freed and reduced together."""

    modules: tuple[nn.Module, ...]
    places: tuple[tuple[nn.Module, str, str], ...]
    """(owning module, attribute, name) of each of its parameters; a shared parameter has several places."""
    names: tuple[str, ...]

    def reduces(self) -> bool:
        """Whether gradients are reduced in this backward (`set_requires_gradient_sync`)."""
        return all(group.reduce_grads for group in _groups(self.modules[0]))


@dataclass(slots=True, eq=False)
class _Reduction:
    """The reductions of one backward pass: a queue of units, in an order that all ranks share."""

    waiting: list[Unit]
    """Units that were not reduced yet, in the order in which they will be."""
    arrived: set[str] = field(default_factory=set)
    """Names of the parameters whose clipped sum is in, or will not come."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Clipped sums [whole shape] of units that are not the next one."""
    bucket: Tensor | None = None
    """Of the next unit, [ranks, elements of a rank's padded shards]: it fills sum by sum, so none is held twice."""
    running: tuple[Unit, Tensor, Tensor, dist.Work] | None = None
    """Unit, its shards, the bucket that they come from, and the reduction in flight: one at a time."""


class FSDP2Backend(LocalBackend):
    """Gradients of a model on which `fully_shard` was called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.mesh, self._shard_dim = _mesh(model, self.parameters)
        self.units = list(_units(model, {id(p): name for name, p in self.parameters.items()}))
        for unit in self.units:
            self._refuse_mixed(unit)
        self._unit_of_module = {module: unit for unit in self.units for module in unit.modules}
        self.whole: dict[str, Tensor] = dict(self.parameters)
        """The unsharded parameters by name, as last seen in the forward of their unit; sharded ones until it runs."""
        self.differentiated: Mapping[str, Tensor] = self.whole
        self._reduction: _Reduction | None = None
        self._unreduced: dict[str, Tensor] = {}  # sums of backward passes that were told not to reduce

    def _refuse_mixed(self, unit: Unit) -> None:
        """Raise ConfigurationError for what FSDP would refuse in the first forward."""
        complex_ones = [name for name in unit.names if self.parameters[name].is_complex()]
        if complex_ones and len(complex_ones) < len(unit.names):
            raise ConfigurationError(
                f"{complex_ones[0]} is complex, but FSDP gathers parameters of one dtype together. Call fully_shard on "
                f"the module that owns it, without real parameters; or store it as real numbers [..., 2], and call "
                f"torch.view_as_complex in forward."
            )

    @property
    def rank(self) -> int:
        """Number of this rank among those that share the data."""
        return dist.get_rank(self._group())

    @property
    def world_size(self) -> int:
        """Number of ranks that share the data."""
        return self.mesh.size()

    @property
    def layout(self) -> str:
        """See LocalBackend."""
        return f"shards on a mesh of {' x '.join(map(str, self.mesh.shape))}"

    def _group(self) -> dist.ProcessGroup:
        return self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh._flatten().get_group()

    def _knows(self, name: str, parameter: nn.Parameter) -> bool:
        # FSDP swaps the attributes of a module while it runs.
        return self.parameters.get(name) is parameter or self.whole.get(name) is parameter

    # --- forward ----------------------------------------------------------------------------------------------------

    def gathers(self, module: nn.Module) -> bool:
        """See LocalBackend."""
        return isinstance(module, FSDPModule)

    def gather(self, module: nn.Module) -> None:
        """See LocalBackend."""
        assert isinstance(module, FSDPModule)
        module.unshard()

    def dry_run(self) -> AbstractContextManager[Any]:
        """See LocalBackend; its forwards gather parameters, so all ranks come together first."""
        meet_for_probe(self._group())
        return super().dry_run()

    def guard_disabled(self) -> AbstractContextManager[Any]:
        """See LocalBackend; what was sharded before the block is sharded after it."""
        stack = ExitStack()
        stack.enter_context(super().guard_disabled())
        for unit in self.units:
            module = unit.modules[0]
            assert isinstance(module, FSDPModule)
            if all(group.is_sharded for group in _groups(module)):
                # The last forward leaves the root gathered, and an optimizer made then would hold what FSDP frees.
                stack.callback(module.reshard)
        return stack

    def bind(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters of the unit whose forward begins."""
        unit = self._unit_of_module.get(module)
        for owner, attribute, name in unit.places if unit is not None else ():
            parameter = owner._parameters[attribute]
            assert parameter is not None
            if self.whole[name] is not parameter:
                self.whole[name] = parameter
                self.guard.watch(name, parameter.requires_grad_())
            # FSDP makes it once, and does not learn of a sharded parameter that is frozen, or thawed, later.
            parameter.requires_grad_(self.parameters[name].requires_grad)
            yield name, parameter

    # --- backward ---------------------------------------------------------------------------------------------------

    def reduce(self, names: Sequence[str], take: Callable[[str], Tensor | None]) -> list[Tensor | None]:
        """Reduce the clipped sums; anchors return nothing, the shards are in `.grad` when backward ends."""
        if self._begin():
            self._reduction = None  # of a backward pass that failed
        self._require_untouched(names)
        if self._reduction is None:
            self._reduction = _Reduction([unit for unit in reversed(self.units) if unit.names])
        reduction, asked = self._reduction, set(names)
        for unit in list(reduction.waiting):
            for name in unit.names:
                if name in asked:
                    self._collect(reduction, unit, name, take(name))
            self._launch_complete(reduction)
        return [None] * len(names)

    def _accumulated(self, name: str) -> None:
        # Autograd calls it without a gradient, and FSDP when it has reduced one of its own.
        if not self.guard.is_untouched(name):
            raise UnsupportedParameterError(
                f"{name}: FSDP has reduced a gradient that nobody clipped. A backward that was not to be reduced "
                f"(set_requires_gradient_sync(False)), or that used the parameter after unshard() or in a method "
                f"of register_fsdp_forward_method(), has left it on the gathered parameter. Call zero_grad(), and "
                f"let training use parameters in forward alone."
            )

    def _collect(self, reduction: _Reduction, unit: Unit, name: str, total: Tensor | None) -> None:
        """Take in the clipped sum [whole shape] of a parameter; None if no gradient arrived."""
        reduction.arrived.add(name)
        if total is None:
            return
        if not unit.reduces():
            held = self._unreduced.get(name)
            self._unreduced[name] = total if held is None else held + total
            self._stand_in(name)
        elif unit is reduction.waiting[0]:
            self._fill(reduction, name, total)
        else:
            reduction.sums[name] = total

    def _launch_complete(self, reduction: _Reduction) -> None:
        while reduction.waiting and reduction.arrived.issuperset(reduction.waiting[0].names):
            unit = reduction.waiting[0]
            if unit.reduces():
                launched = self._reduce_scatter(reduction)
                self._finish(reduction)
                reduction.running = launched
            del reduction.waiting[0]
            for name in reduction.waiting[0].names if reduction.waiting else ():
                if name in reduction.sums:
                    self._fill(reduction, name, reduction.sums.pop(name))

    def _end(self) -> None:
        super()._end()
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        for unit in reduction.waiting:
            reduction.arrived.update(unit.names)  # a layer that did not run here may have run elsewhere
        self._launch_complete(reduction)
        self._finish(reduction)

    def _finish(self, reduction: _Reduction) -> None:
        if reduction.running is None:
            return
        unit, shards, _, work = reduction.running
        reduction.running = None
        work.wait()
        for group in self._replica_groups():
            dist.all_reduce(shards, group=group)
        self._require_untouched(unit.names)  # also those of layers that did not run here, so that nobody has asked yet
        with torch.no_grad():
            for name, columns in self._columns(unit):
                local = as_real(self._local(self.parameters[name]))
                self._accumulate(name, shards[columns.start : columns.start + local.numel()].view(local.shape))

    def _columns(self, unit: Unit) -> Iterator[tuple[str, slice]]:
        """Where the padded shards of the parameters of a unit lie in a row of its bucket, complex ones as pairs."""
        start = 0
        for name in unit.names:
            stop = start + self._rows(name) * as_real(self._local(self.parameters[name])).shape[1:].numel()
            yield name, slice(start, stop)
            start = stop

    def _bucket(self, reduction: _Reduction) -> Tensor:
        """The bucket of the next unit."""
        if reduction.bucket is None:
            unit = reduction.waiting[0]
            width = max(columns.stop for _, columns in self._columns(unit))
            dtypes = (self.parameters[name].dtype.to_real() for name in unit.names)
            dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
            reduction.bucket = torch.zeros(self._shard_mesh().size(), width, dtype=dtype, device=self._device())
        return reduction.bucket

    def _fill(self, reduction: _Reduction, name: str, total: Tensor) -> None:
        columns = dict(self._columns(reduction.waiting[0]))[name]
        _add_chunks(self._bucket(reduction)[:, columns], as_real(total), self._rows(name))

    def _reduce_scatter(self, reduction: _Reduction) -> tuple[Unit, Tensor, Tensor, dist.Work]:
        """Start the one reduce-scatter of the next unit, bucket -> shards."""
        unit, bucket = reduction.waiting[0], self._bucket(reduction)
        reduction.bucket = None
        for name, columns in self._columns(unit):
            held = self._unreduced.pop(name, None)
            if held is not None:
                _add_chunks(bucket[:, columns], as_real(held), self._rows(name))
        shards = bucket.new_empty(bucket.shape[1])
        work = reduce_scatter(shards, bucket.view(-1), group=self._shard_mesh().get_group(), async_op=True)
        assert work is not None
        return unit, shards, bucket, work

    def _accumulate(self, name: str, shard: Tensor) -> None:
        """Add a rank's part of a clipped sum to `.grad`, or to the wide sum of a half-precision parameter.

        `shard`: of a complex parameter, its pairs of parts.
        """
        parameter = self.parameters[name]
        if not parameter.requires_grad:  # frozen since
            return
        shard = shard.to(self._local(parameter).device)
        if parameter.dtype in WIDE:
            if parameter.grad is None:
                # A copy: the bucket is freed, and what follows in it belongs to other parameters.
                gradient = torch.empty_like(self._local(parameter))
                as_real(gradient).copy_(shard)
                self._assign(parameter, gradient)
            else:
                as_real(self._local(parameter.grad)).add_(shard)
        else:
            wide = self._wide_sums.get(name)
            self._wide_sums[name] = shard.clone() if wide is None else wide.add_(shard)
            self._stand_in(name)
        self.guard.note(name)

    def _stand_in(self, name: str) -> None:
        """Put zeros in `.grad` for a sum that is kept elsewhere: whoever drops or changes gradients is noticed."""
        parameter = self.parameters[name]
        if parameter.requires_grad and parameter.grad is None:
            self._assign(parameter, torch.zeros_like(self._local(parameter)))
            self.guard.note(name)

    # --- shards -----------------------------------------------------------------------------------------------------

    def _shard_mesh(self) -> DeviceMesh:
        return self.mesh if self.mesh.ndim == 1 else self._part(self._shard_dim)

    def _replica_groups(self) -> Iterator[dist.ProcessGroup]:
        """The groups of ranks that hold the same shard (HSDP)."""
        for dim in range(self.mesh.ndim):
            if dim != self._shard_dim:
                yield self._part(dim).get_group()

    def _part(self, dim: int) -> DeviceMesh:
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh[names[dim]]

    def _rows(self, name: str) -> int:
        """Rows of a padded shard; the last ranks hold fewer, or none."""
        return -(-self.parameters[name].shape[0] // self._shard_mesh().size())

    def _local(self, x: Tensor) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def _full(self, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def _start(self, name: str) -> int:
        shape = self.parameters[name].shape
        return min(shape[0], self._rows(name) * self._shard_mesh().get_local_rank()) * shape[1:].numel()

    def _assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        p = parameter
        assert isinstance(p, DTensor)
        parameter.grad = DTensor.from_local(
            gradient, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _over_shards(self, x: Tensor) -> Tensor:
        x = x.to(self._device())
        dist.all_reduce(x, group=self._shard_mesh().get_group())
        return x

    def runs_everywhere(self, *, last: bool) -> bool:
        """See LocalBackend: every forward and backward gathers parameters."""
        return True

    def _fault(self) -> DpshardError | None:
        if self._unreduced:
            return LogicalBatchError(
                f"The clipped sum of {next(iter(self._unreduced))} was not reduced over ranks: "
                f"set_requires_gradient_sync(False) was still in force in the last micro-batch. Set it to True there."
            )
        return super()._fault()

    def _whole_digest(self, ranks_WL: Tensor) -> Tensor:
        names = self._shard_mesh().mesh_dim_names
        dim = 0 if self.mesh.ndim == 1 else (self.mesh.mesh_dim_names or ()).index((names or ("",))[0])
        replicas_RL = ranks_WL.unflatten(0, self.mesh.shape).sum(dim).view(-1, ranks_WL.shape[1])
        if bool((replicas_RL != replicas_RL[0]).any()):
            self._forget_sums()
            raise LogicalBatchError(
                "The clipped sums of this logical batch differ between the replicas of a hybrid-sharded model, so "
                "these would drift apart. All ranks run the same micro-batches and backward passes; zero_grad() then "
                "makes a fresh start."
            )
        return replicas_RL[0]

    def _forget_sums(self) -> None:
        super()._forget_sums()
        self._unreduced.clear()

    def share(self, secret: bytes) -> bytes:
        """See LocalBackend."""
        return from_rank_0(secret, self._group(), self._device())

    def stack(self, x: Tensor) -> Tensor:
        """See LocalBackend."""
        return stacked(x, self._group(), self._device())

    def _device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def _add_chunks(rows: Tensor, total: Tensor, rows_per_rank: int) -> None:
    """Add a whole sum to its columns of a bucket [ranks, columns]: shard r of dimension 0 to row r."""
    full = total.shape[0] // rows_per_rank  # ranks whose shard is not cut short
    rows[:full] += total[: full * rows_per_rank].reshape(full, rows.shape[1])
    rest = total[full * rows_per_rank :]
    if len(rest):
        rows[full, : rest.numel()] += rest.reshape(-1)


def _groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP gathers together for `module`, on which fully_shard was called."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _mesh(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> tuple[DeviceMesh, int]:
    """The one mesh of all parameters, and its dimension over which they are sharded; HSDP replicates over the other.

    Raises ConfigurationError for parameters that dpshard does not know in such a place.
    """
    whole = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if whole:
        raise ConfigurationError(
            f"{whole[0]} is not sharded, so ranks would update it apart. Call fully_shard on the root module too."
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    placed = [p for unit in units for group in _groups(unit) for p in group.fsdp_params if _is_placed_by_fsdp(p)]
    refuse_foreign_placements(model, {id(p.sharded_param) for p in placed})
    trained = [p for p in placed if p.sharded_param.requires_grad] or placed
    # By value: without mesh=, each call of fully_shard makes one of its own over all ranks.
    meshes = {(p.mesh_info.mesh, p.mesh_info.shard_mesh_dim) for p in trained}
    if len(meshes) != 1:
        raise ConfigurationError("The parameters live on several device meshes; shard all units over one mesh.")
    ((mesh, shard_dim),) = meshes
    for name, p in parameters.items():
        assert isinstance(p, DTensor)
        if [placement for placement in p.placements if not isinstance(placement, Replicate)] != [Shard(0)]:
            raise ConfigurationError(
                f"{name} is placed as {p.placements}; dpshard knows parameters that FSDP has sharded along dimension "
                f"0, and replicated over nodes (HSDP)."
            )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ConfigurationError("A hybrid-sharded mesh needs names: init_device_mesh(..., mesh_dim_names=...).")
    return mesh, shard_dim


def _is_placed_by_fsdp(parameter: Any) -> bool:
    """Whether each dimension of a parameter's mesh is one over which FSDP shards or replicates it.

    Placements do not tell: a norm of a tensor-parallel model lies as under HSDP.
    """
    sharded, info = parameter.sharded_param, parameter.mesh_info
    own = {info.shard_mesh_dim, info.replicate_mesh_dim} - {None}
    return sharded.device_mesh == info.mesh and own == set(range(info.mesh.ndim)) and not parameter.is_dtensor


def _units(model: nn.Module, names: dict[int, str]) -> Iterator[Unit]:
    """The FSDP units of a model, outermost first; `fully_shard` makes one of a list of modules, too."""
    modules: dict[int, list[nn.Module]] = {}
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule):
            unit = id(module._get_fsdp_state())
            modules[unit] = [*modules.pop(unit, []), module]  # behind all units within
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
