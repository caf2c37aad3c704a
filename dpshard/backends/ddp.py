"""DistributedDataParallel: every rank holds the whole model, gradients are averaged as they arrive.

A script may keep DDP from reducing (`model.module(x)`, `no_sync()`, a late backward). Then `.grad` holds one rank's
sums, W times too large for the noise. Reduced sums are bitwise equal on all ranks, so ranks compare the digests of
their sums before the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.backend import Backend
from dpshard.backends.collectives import sum_in_place
from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore, add
from dpshard.backends.model_parts import DeclaredParts
from dpshard.backends.roles import Reduction, Take
from dpshard.backends.sharding import Unsharded
from dpshard.errors import ConfigurationError, DpshardError, LogicalBatchError
from dpshard.names import canonical_name
from dpshard.records import WIDE, accum_dtype


def ddp_backend(model: DistributedDataParallel, declared: DeclaredParts | None = None) -> Backend:
    """Back-end of a model, or of parts, in DistributedDataParallel."""
    group = model.process_group
    refuse_other_reductions(model)
    # Within no_sync() the reducer ignores forwards and backwards outside training.
    sharding = _Replicated(model.module, model, isolated=model.no_sync)
    communicator = Communicator(dist.get_world_size(group), lambda: group, sharding.device)
    store = DotGradStore(sharding)
    reduction = DDPReduction(model, sharding, communicator, store)
    layout = f"{communicator.world_size} replicas"
    if declared is None:
        return Backend(layout, communicator, sharding, reduction, store)
    everyone, grid = sharding.take_declared(declared, communicator)
    if sharding.parts is not None and sharding.parts.of_samples:
        _refuse_reduced_experts(model, sharding)
        return Backend(f"{layout}, with experts of their own", everyone, sharding, reduction, store, None, grid)
    layout += f" of {everyone.world_size // communicator.world_size} parts"
    return Backend(layout, everyone, sharding, reduction, store, communicator, grid)


class _Replicated(Unsharded):
    accumulates = True


class DDPReduction(Reduction):
    """Lets DDP reduce. Half-precision sums are reduced in float32, after the last backward."""

    def __init__(
        self, model: DistributedDataParallel, sharding: Unsharded, communicator: Communicator, store: DotGradStore
    ) -> None:
        self._model, self._communicator, self._store = model, communicator, store
        self._parameters, self._guard, self._sharding = sharding.parameters, sharding.guard, sharding

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Return gradients whose mean over ranks is the sum of the clipped sums."""
        refuse_other_reductions(self._model)
        begins = self._store.begins(self._end)
        # At its end, a pass accepts all gradients as the reducer's, so check all at its beginning.
        self._store.require_untouched(self._parameters if begins else names)
        return [self._gradient(name, self._store.whole_sum(name, take(name))) for name in names]

    def _gradient(self, name: str, clipped_sum: Tensor | None) -> Tensor | None:
        parameter = self._parameters[name]
        if clipped_sum is None:
            # The reducer waits for every parameter; another rank may have used this one.
            clipped_sum = torch.zeros_like(parameter, dtype=accum_dtype(parameter))
        if parameter.dtype not in WIDE:
            return self._store.through_autograd(name, clipped_sum, self._store.unreduced)
        # DDP takes the mean over ranks; the sensitivity is that of the sum. An expert's sum is complete.
        ranks = 1 if self._has_experts and self._sharding.parts.is_cut(name) else self._communicator.world_size
        return self._guard.expect(name, (clipped_sum * ranks).to(parameter.dtype))

    @property
    def _has_experts(self) -> bool:
        return self._sharding.parts is not None and self._sharding.parts.of_samples

    def _end(self) -> None:
        if not self._model.require_backward_grad_sync:  # within no_sync() only autograd writes
            return
        # DDP's own callback, which waits for the reductions, runs later.
        torch.autograd.Variable._execution_engine.queue_callback(self._note_all)

    def _note_all(self) -> None:
        self._guard.note_all(self._parameters)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context around one micro-batch; DDP reduces only in the last one."""
        return nullcontext() if last else self._model.no_sync()

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True if ranks reduce in this backward, or share experts."""
        return last or self._has_experts

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        return self._store.fault()

    @property
    def _half(self) -> list[str]:
        """Half-precision parameters, which DDP does not reduce."""
        return [name for name, p in self._parameters.items() if p.dtype not in WIDE and p.requires_grad]

    @property
    def is_unsummed(self) -> bool:
        """True if `sum_rest` has sums to reduce."""
        return bool(self._half)

    def sum_rest(self) -> None:
        """Reduce half-precision sums; a second call adds later ones."""
        half, unreduced = self._half, self._store.unreduced
        sums = [
            unreduced.pop(name) if name in unreduced else torch.zeros_like(self._parameters[name], dtype=torch.float32)
            for name in half
        ]
        assert self._communicator.group is not None
        sum_in_place(sums, self._communicator.group)
        for name, total in zip(half, sums, strict=True):
            add(self._store.wide_sums, name, total)

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Digest of the first rank; raise LogicalBatchError if others differ."""
        if bool((ranks_WL != ranks_WL[0]).any()):
            raise LogicalBatchError(
                "DistributedDataParallel did not reduce the clipped sums of this logical batch: they differ between "
                "ranks. Call the wrapped model, not its .module. Call backward() within its own micro-batch. Leave "
                "no_sync() to engine.batches(...), or, in a loop of your own, out of the last micro-batch. Call "
                "zero_grad() to start afresh."
            )
        return ranks_WL[0]


def _refuse_reduced_experts(model: DistributedDataParallel, sharding: Unsharded) -> None:
    parts = sharding.parts
    assert parts is not None
    ignored = {canonical_name(name) for name in model.parameters_to_ignore}
    wrong = [name for name in sharding.parameters if parts.is_cut(name) != (name in ignored)]
    if wrong:
        sharding.detach()
        raise ConfigurationError(
            f"{wrong[0]}: DistributedDataParallel must leave out the experts of a rank, and nothing else. Call "
            f"DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names_of_experts) before you "
            f"wrap the model."
        )


def refuse_other_reductions(model: DistributedDataParallel) -> None:
    """Raise ConfigurationError if DDP does more than average gradients."""
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise ConfigurationError(
            f"DistributedDataParallel has a communication hook ({hook}), which sees clipped sums before the noise. "
            f"Compression changes the accounted sum, and an optimizer that overlaps with backward "
            f"(ZeroRedundancyOptimizer(overlap_with_ddp=True)) steps without noise. Make DistributedDataParallel "
            f"without register_comm_hook and mixed_precision; for mixed precision use torch.autocast."
        )
    if model.static_graph:
        raise ConfigurationError(
            "DistributedDataParallel(static_graph=True) learns from the first backward when gradients arrive, but "
            "verification runs backwards of its own. Leave static_graph out, and checkpoint activations with "
            "use_reentrant=False, which does not need it."
        )
    if model._join_config.enable:
        raise ConfigurationError(
            "Join runs DistributedDataParallel with fewer and fewer ranks, but every rank takes part in every "
            "private step. Leave join() out: engine.batches(...) gives all ranks the same number of micro-batches."
        )
