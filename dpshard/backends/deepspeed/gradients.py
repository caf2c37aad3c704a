"""DeepSpeed's ZeRO-1, 2 and 3: the optimizer steps on flat fp32 partitions, one per rank.

[Note: What reaches DeepSpeed] Anchors differentiate dummies, so any gradient of a parameter is a leak, and raises.
Clipped sums are summed over ranks into accumulators laid out like the partitions. At the inner optimizer's step the
noised and divided accumulator becomes the partition's gradient. Without privatization the partition has no gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from dpshard.backends.backend import Backend
from dpshard.backends.backward_passes import BackwardPasses
from dpshard.backends.deepspeed.config import refuse_unsupported, require_no_accumulation
from dpshard.backends.deepspeed.reducer import Reducer, Shape
from dpshard.backends.deepspeed.sharding import ZeroSharding
from dpshard.backends.roles import Reduction, Take
from dpshard.errors import LogicalBatchError
from dpshard.noise.keyed import SumShard


def deepspeed_backend(model_engine: Any) -> Backend:
    """Back-end of a model engine."""
    stage = refuse_unsupported(model_engine)
    sharding = ZeroSharding(model_engine, stage)
    communicator, reducer = sharding.communicator, reducer_of(sharding, stage)
    reduction = PartitionReduction(model_engine, reducer, stage=stage)
    layout = f"ZeRO-{stage} on {communicator.world_size} ranks"
    return Backend(layout, communicator, sharding, reduction, PartitionStore(sharding, reducer))


def reducer_of(sharding: ZeroSharding, stage: int) -> Reducer:
    """Return the reducer of a model. It is late in stage 1, which holds whole gradients anyway."""
    shapes = {
        name: Shape(math.prod(shape), torch.promote_types(p.dtype, torch.float32), sharding.compute_device)
        for (name, shape), p in zip(sharding.shapes.items(), sharding.parameters.values(), strict=True)
    }
    group = sharding.communicator.group
    assert group is not None
    return Reducer(sharding.layout, shapes, group, late=stage == 1)


class PartitionReduction(Reduction):
    """Reduces clipped sums in place of DeepSpeed; see [Note: Why DeepSpeed does not reduce]."""

    def __init__(self, model_engine: Any, reducer: Reducer, *, stage: int) -> None:
        self._model_engine, self._reducer, self._stage = model_engine, reducer, stage
        self._passes = BackwardPasses()
        self._restored = list(_keep_from_reducing(model_engine))

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Reduce the clipped sums; return None for each, because parameters get no gradient."""
        require_no_accumulation(self._model_engine)
        if self._passes.begins(self._reducer.finish):
            self._reducer.abandon()  # left by a failed backward pass
        for name in reversed(names):
            self._reducer.put(name, take(name))
        return [None] * len(names)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context around one micro-batch; model_engine.step() steps only after the last one."""
        return self._micro_batch(last)

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        engine = self._model_engine
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(last)
        before = self._reducer.passes
        yield
        if self._reducer.passes == before:
            # Other ranks may have had a backward.
            self._reducer.finish()
            if engine.enable_backward_allreduce:
                engine.allreduce_gradients()

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True in stage 3, where forwards and backwards unshard."""
        return self._stage == 3

    def fault(self) -> None:
        """Return None: scripts cannot reach the sums."""
        return

    @property
    def is_unsummed(self) -> bool:
        """True: `sum_rest` may have sums to reduce."""
        return True

    def sum_rest(self) -> None:
        """Reduce stage 1's sums."""
        self._reducer.complete()

    def detach(self) -> None:
        """Restore DeepSpeed."""
        for restore in self._restored:
            restore()
        if self._model_engine.managed_gradient_accumulation():
            self._model_engine.set_gradient_accumulation_boundary(None)


class PartitionStore:
    """Keeps sums in the Reducer."""

    def __init__(self, sharding: ZeroSharding, reducer: Reducer) -> None:
        self._sharding, self._reducer = sharding, reducer
        self._parameters, self._guard = sharding.parameters, sharding.guard
        self._private: dict[int, Tensor] = {}  # by id of the master

    def shards(self) -> list[SumShard]:
        """Return this rank's sums for the noise."""
        fragments = self._sharding.layout.fragments
        return [
            SumShard(name, self._reducer.fragment(name), fragments[name].start)
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def privatize(self, release_: Callable[[Sequence[SumShard]], Tensor]) -> Tensor:
        """Make the sums private gradients; return their L2 norm [] before noise."""
        with torch.no_grad():
            shards = self.shards()
            self._private = self._reducer.take()
            for name, parameter in self._parameters.items():
                if not parameter.requires_grad:
                    self._reducer.fragment(name, self._private).zero_()  # frozen meanwhile
            norm = release_(shards)
        self._guard.reset()
        return self._sharding.over_shards(norm.square()).sqrt()

    def install(self, held: set[Tensor]) -> None:
        """Put private gradients on DeepSpeed's partitions."""
        for master in held & set(self._sharding.layout.masters):
            gradient = self._private.pop(id(master), None)
            if gradient is None:
                raise LogicalBatchError(
                    "DeepSpeed is about to step without a private gradient: it already stepped with this logical "
                    "batch, or the batch had no backward pass. Call model_engine.step() once per logical batch."
                )
            if master.grad is None:
                master.grad = gradient.to(master.device, master.dtype)
            else:
                master.grad.copy_(gradient)  # DeepSpeed may own this buffer

    def full_gradient(self, name: str) -> Tensor | None:
        """Whole private gradient, if any; all ranks call it, in one order."""
        if not self._private:
            return None
        return self._sharding.unshard(name, self._reducer.fragment(name, self._private))

    def refuse_stale(self) -> None:
        """Raise LogicalBatchError if DeepSpeed has not stepped since the last release."""
        if self._private:
            raise LogicalBatchError(
                "DeepSpeed has not stepped with the gradient of the last logical batch. Call model_engine.step() "
                "after every logical batch."
            )

    def drop(self) -> None:
        """Drop sums and private gradients."""
        self._reducer.clear()
        self._private.clear()
        self._guard.reset()

    def forget(self) -> None:
        """Forget the guard's records."""
        self._guard.forget()


def _keep_from_reducing(model_engine: Any) -> Iterator[Callable[[], object]]:
    """Keep DeepSpeed from reducing, which fails on an empty bucket; yield functions that undo it."""
    zero = model_engine.optimizer
    if hasattr(zero, "reduce_ipg_grads"):
        # Compiled backwards run hooks of parameters without a gradient, too.
        for name in ("reduce_ipg_grads", "process_gradients"):
            setattr(zero, name, lambda *_, **__: None)
            yield functools.partial(delattr, zero, name)
    elif hasattr(zero, "bf16_groups"):
        model_engine.enable_backward_allreduce = False
        yield lambda: setattr(model_engine, "enable_backward_allreduce", True)
