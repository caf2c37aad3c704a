"""From clipped sums to shards, instead of FSDP2's own reduction.

[Note: From clipped sums to shards] Anchors differentiate the sharded parameters, so FSDP has nothing to reduce. The
clipped sums of a unit, which FSDP gathers and frees together, fill one bucket for one reduce-scatter during backward.
- Ranks are summed, never averaged: the sensitivity is that of the sum.
- Buckets are float32 or wider: rounding to bfloat16 can move the sum by more than one sample does.
- All ranks reduce all units in one fixed order, also units with layers that did not run here.
A unit is reduced when its last sum arrives, so ranks must use the same parameters. After
`set_reduce_scatter_unused_params(True)`, all units are reduced at the end of backward instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.backends.collectives import reduce_scatter
from dpshard.backends.fsdp2.sharding import FSDP2Sharding
from dpshard.backends.fsdp2.units import Unit
from dpshard.backends.grad_store import DotGradStore, add
from dpshard.backends.roles import Reduction, Take
from dpshard.errors import DpshardError, LogicalBatchError
from dpshard.records import as_real


@dataclass(slots=True, eq=False)
class _Pass:
    waiting: list[Unit]
    """Units not reduced yet, in order."""
    arrived: set[str] = field(default_factory=set)
    """Parameters whose sums are in, or will not come."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Whole sums of the units after the next one."""
    bucket: Tensor | None = None
    """Bucket of the next unit: [ranks, elements of a rank's padded shards]."""
    running: tuple[Unit, Tensor, Tensor, dist.Work] | None = None
    """Unit, shards, source bucket, work."""


class UnitReduction(Reduction):
    """Reduces clipped sums unit by unit; see [Note: From clipped sums to shards]."""

    def __init__(self, sharding: FSDP2Sharding, store: DotGradStore) -> None:
        self._sharding, self._store, self._parameters = sharding, store, sharding.parameters
        self._columns = {unit: dict(self._lay_out(unit)) for unit in sharding.units}
        self._at_end = {unit for unit in sharding.units if unit.take_unused(flag=False)}
        """Units whose parameters may differ between ranks. If there are any, all units are reduced at the end."""
        self._pass: _Pass | None = None

    def _is_sliced(self, name: str) -> bool:
        parts = self._sharding.parts
        return parts is not None and parts.is_termwise(name)

    def _width(self, name: str) -> int:
        parts, local = self._sharding.parts, as_real(self._sharding.local(self._parameters[name]))
        if parts is not None and self._is_sliced(name):
            return parts.terms.slices.width(name, local.shape)
        return self._sharding.rows(name) * local.shape[1:].numel()

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Reduce the clipped sums to `.grad`; return None for each."""
        if self._store.begins(self._end):
            self._pass = None  # left by a failed backward pass
        self._store.require_untouched(names)
        reduction, asked = self._pass or self._begin_pass(), set(names)
        if again := [name for name in names if name in reduction.arrived and take(name) is not None]:
            raise LogicalBatchError(
                f"{again[0]} was summed twice in one backward pass, which reduces it once: a sample would be missing. "
                f"Call backward on the sum of all losses of a forward, before the next forward."
            )
        for unit in list(reduction.waiting):
            for name in unit.names:
                if name in asked:
                    self._collect(reduction, unit, name, take(name))
            if not self._at_end:
                self._launch_complete(reduction)
        return [None] * len(names)

    def _begin_pass(self) -> _Pass:
        self._pass = _Pass([unit for unit in reversed(self._sharding.units) if unit.names])
        return self._pass

    def _reduces(self, unit: Unit) -> bool:
        return unit.reduces()

    def _collect(self, reduction: _Pass, unit: Unit, name: str, total: Tensor | None) -> None:
        reduction.arrived.add(name)
        if total is None:
            return
        if not self._reduces(unit):
            add(self._store.unreduced, name, total)
            self._store.stand_in(name)
        elif unit is reduction.waiting[0]:
            self._fill(reduction, name, total)
        else:
            reduction.sums[name] = total

    def _launch_complete(self, reduction: _Pass) -> None:
        while reduction.waiting and reduction.arrived.issuperset(reduction.waiting[0].names):
            unit = reduction.waiting[0]
            if self._reduces(unit):
                launched = self._reduce_scatter(reduction)
                self._finish(reduction)
                reduction.running = launched
            del reduction.waiting[0]
            for name in reduction.waiting[0].names if reduction.waiting else ():
                if name in reduction.sums:
                    self._fill(reduction, name, reduction.sums.pop(name))

    def _end(self) -> None:
        reduction, self._pass = self._pass, None
        if reduction is None:
            return
        for unit in reduction.waiting:
            reduction.arrived.update(unit.names)  # another rank may have run these layers
        self._launch_complete(reduction)
        self._finish(reduction)

    def _finish(self, reduction: _Pass) -> None:
        if reduction.running is None:
            return
        unit, shards, _, work = reduction.running
        reduction.running = None
        work.wait()
        for group in self._sharding.replica_groups():
            dist.all_reduce(shards, group=group)
        self._add_shards(unit, shards)

    def _add_shards(self, unit: Unit, shards: Tensor) -> None:
        self._store.require_untouched(unit.names)  # layers that did not run here are not checked yet
        with torch.no_grad():
            joined = self._join_slices(unit, shards)
            for name, columns in self._columns[unit].items():
                local = as_real(self._sharding.local(self._parameters[name]))
                shard = joined[:, columns].reshape(-1) if self._is_sliced(name) else shards[columns]
                self._store.add_shard(name, shard[: local.numel()].view(local.shape))

    def _join_slices(self, unit: Unit, shards: Tensor) -> Tensor:
        parts, columns = self._sharding.parts, self._columns[unit]
        sliced = max((columns[name].stop for name in columns if self._is_sliced(name)), default=0)
        return parts.terms.slices.joined(shards[:sliced]) if parts is not None and sliced else shards[None]

    def _lay_out(self, unit: Unit) -> Iterator[tuple[str, slice]]:
        start = 0
        for name in sorted(unit.names, key=lambda name: not self._is_sliced(name)):
            stop = start + self._width(name)
            yield name, slice(start, stop)
            start = stop

    def _bucket(self, reduction: _Pass) -> Tensor:
        if reduction.bucket is None:
            unit = reduction.waiting[0]
            width = max(columns.stop for columns in self._columns[unit].values())
            dtypes = (self._parameters[name].dtype.to_real() for name in unit.names)
            dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
            ranks, device = self._sharding.shard_group.size(), self._sharding.compute_device
            reduction.bucket = torch.zeros(ranks, width, dtype=dtype, device=device)
        return reduction.bucket

    def _fill(self, reduction: _Pass, name: str, total: Tensor) -> None:
        self._add(self._bucket(reduction)[:, self._columns[reduction.waiting[0]][name]], name, total)

    def _add(self, rows: Tensor, name: str, total: Tensor) -> None:
        if self._is_sliced(name):
            rows += total.view(len(rows), -1)
        else:
            _add_chunks(rows, as_real(total), self._sharding.rows(name))

    def _reduce_scatter(self, reduction: _Pass) -> tuple[Unit, Tensor, Tensor, dist.Work]:
        unit, bucket = reduction.waiting[0], self._bucket(reduction)
        reduction.bucket = None
        for name, columns in self._columns[unit].items():
            held = self._store.unreduced.pop(name, None)
            if held is not None:
                self._add(bucket[:, columns], name, held)
        shards = bucket.new_empty(bucket.shape[1])
        work = reduce_scatter(shards, bucket.view(-1), group=self._sharding.shard_group, async_op=True)
        assert work is not None
        return unit, shards, bucket, work

    # --- one logical batch

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True: every forward unshards."""
        return True

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        if self._store.unreduced:
            return LogicalBatchError(
                f"The clipped sum of {next(iter(self._store.unreduced))} was not reduced over ranks: "
                f"set_requires_gradient_sync(False) was still in force in the last micro-batch. Set it to True there."
            )
        return self._store.fault()

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Digest [L] of the sums; raise LogicalBatchError if replicas differ."""
        shape, shard_dim = self._sharding.data_shape, self._sharding.shard_dim
        replicas_RL = ranks_WL.unflatten(0, shape).sum(shard_dim).view(-1, ranks_WL.shape[1])
        if bool((replicas_RL != replicas_RL[0]).any()):
            raise LogicalBatchError(
                "The clipped sums of this logical batch differ between the replicas of a hybrid-sharded model, so the "
                "replicas would drift apart. Run the same micro-batches and backward passes on all ranks. Call "
                "zero_grad() to start afresh."
            )
        return replicas_RL[0]

    def detach(self) -> None:
        """Restore FSDP."""
        for unit in self._at_end:
            unit.take_unused(flag=True)


def _add_chunks(rows: Tensor, total: Tensor, rows_per_rank: int) -> None:
    """Add shard r of dimension 0 to row r of a bucket [ranks, columns]."""
    full = total.shape[0] // rows_per_rank
    rows[:full] += total[: full * rows_per_rank].reshape(full, rows.shape[1])
    rest = total[full * rows_per_rank :]
    if len(rest):
        rows[full, : rest.numel()] += rest.reshape(-1)
