"""DistributedDataParallel: every rank holds the whole model, gradients are averaged over ranks as they arrive.

[Note: Reduced or not]
DDP decides in its own forward whether the next backward reduces. A forward that goes past it (`model.module(x)`), a
`no_sync()` around the last micro-batch, or a backward that comes one micro-batch late leave sums of one rank in
`.grad`, W times as large as the noise is made for. The reducer does not tell. But what it has reduced is the same on
all ranks, bit by bit, or replicas would drift apart in ordinary training too: so ranks compare the digests of their
sums before the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.collectives import from_rank_0
from dpshard.backends.local import WIDE, LocalBackend
from dpshard.backends.ranks import stacked
from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.records import accum_dtype


class DDPBackend(LocalBackend):
    """Gradients of a model in DistributedDataParallel."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model.module)
        self._reduced: dict[str, Tensor] = {}  # of half-precision parameters
        self.model = self.outermost = model
        try:
            self._refuse_other_reductions()
        except ConfigurationError:
            self.detach()
            raise

    @property
    def rank(self) -> int:
        """Number of this rank among those that share the data."""
        return dist.get_rank(self.model.process_group)

    @property
    def world_size(self) -> int:
        """Number of ranks that share the data."""
        return dist.get_world_size(self.model.process_group)

    @property
    def layout(self) -> str:
        """See LocalBackend."""
        return f"{self.world_size} replicas"

    def _refuse_other_reductions(self) -> None:
        """Raise ConfigurationError if DDP is told to do anything else than to average gradients over all ranks."""
        hook = self.model._get_ddp_logging_data().get("comm_hook")
        if hook:
            raise ConfigurationError(
                f"DistributedDataParallel has a communication hook ({hook}), which sees clipped sums before the noise "
                f"is in: compression changes what was accounted, and an optimizer that overlaps with backward "
                f"(ZeroRedundancyOptimizer(overlap_with_ddp=True)) steps without noise. Make DistributedDataParallel "
                f"without register_comm_hook and mixed_precision; for mixed precision use torch.autocast."
            )
        if self.model.static_graph:
            raise ConfigurationError(
                "DistributedDataParallel(static_graph=True) learns from the first backward when gradients arrive, but "
                "verification runs backwards of its own. Leave static_graph out, and checkpoint activations with "
                "use_reentrant=False, which does not need it."
            )
        if self.model._join_config.enable:
            raise ConfigurationError(
                "Join runs DistributedDataParallel with fewer and fewer ranks, but every rank takes part in every "
                "private step. Leave join() out: engine.batches(...) gives all ranks the same number of micro-batches."
            )

    def reduce(self, names: Sequence[str], take: Callable[[str], Tensor | None]) -> list[Tensor | None]:
        """See LocalBackend."""
        self._refuse_other_reductions()
        return super().reduce(names, take)

    def _to_check(self, names: Sequence[str], *, begins: bool) -> Collection[str]:
        # All of them before the first sum, for at the end all gradients are taken for what the reducer has left, also
        # those of parameters that have no part in this backward.
        return self.parameters if begins else names

    def _gradient(self, name: str, clipped_sum: Tensor | None) -> Tensor | None:
        parameter = self.parameters[name]
        if clipped_sum is None:
            # The reducer waits for every parameter; another rank may have used this one.
            clipped_sum = torch.zeros_like(parameter, dtype=accum_dtype(parameter))
        if parameter.dtype not in WIDE:
            return super()._gradient(name, clipped_sum)
        # DDP takes the mean over ranks; the sensitivity is stated for the sum.
        return self.guard.expect(name, (clipped_sum * self.world_size).to(parameter.dtype))

    @property
    def _is_unsummed(self) -> bool:
        return bool(self._half)

    def _sum_rest(self) -> None:
        self._sum_over_ranks(self._half)

    @property
    def _half(self) -> list[str]:
        """Names of the parameters whose sums are kept beside `.grad`, where DDP does not reduce them."""
        return [name for name, p in self.parameters.items() if p.dtype not in WIDE and p.requires_grad]

    def runs_everywhere(self, *, last: bool) -> bool:
        """See LocalBackend: DDP reduces in the backward of the last micro-batch."""
        return last

    def _sum_over_ranks(self, half: Sequence[str]) -> None:
        """Sum what half-precision parameters keep beside their `.grad`, in float32, all in one reduction.

        DDP's reducer, which would round it to the dtype of the parameters, sees zeros. Another call adds what is new.
        """
        zeros = {name: torch.zeros_like(self.parameters[name], dtype=torch.float32) for name in half}
        sums = [self._wide_sums.get(name, zeros[name]) for name in half]
        flat = torch.cat([x.flatten() for x in sums])
        dist.all_reduce(flat, group=self.model.process_group)
        for name, x in zip(half, flat.split([x.numel() for x in sums]), strict=True):
            total, x = self._reduced.get(name), x.view(self.parameters[name].shape)
            self._reduced[name] = x if total is None else total + x
            self._wide_sums.pop(name, None)

    def _sum_of(self, name: str) -> Tensor | None:
        return self._reduced.get(name, super()._sum_of(name))

    def _forget_sums(self) -> None:
        super()._forget_sums()
        self._reduced.clear()

    def _whole_digest(self, ranks_WL: Tensor) -> Tensor:
        if bool((ranks_WL != ranks_WL[0]).any()):
            self._forget_sums()
            raise LogicalBatchError(
                "DistributedDataParallel has not reduced the clipped sums of this logical batch: they differ between "
                "ranks. Call the wrapped model itself, not its .module; call backward() within the micro-batch that it "
                "belongs to; and leave no_sync() to engine.batches(...), or, in a loop of your own, out of the last "
                "micro-batch. zero_grad() then makes a fresh start."
            )
        return ranks_WL[0]

    def _end(self) -> None:
        super()._end()
        if not self.model.require_backward_grad_sync:  # within no_sync() nobody but autograd writes
            return
        # DDP's own callback, which waits for the reductions, comes after this one.
        torch.autograd.Variable._execution_engine.queue_callback(self._note_all)

    def _note_all(self) -> None:
        for name in self.parameters:
            self.guard.note(name)

    def guard_disabled(self) -> AbstractContextManager[Any]:
        """See LocalBackend; the reducer is left in peace as well."""
        stack = ExitStack()
        stack.enter_context(super().guard_disabled())
        stack.enter_context(self.model.no_sync())
        return stack

    def share(self, secret: bytes) -> bytes:
        """See LocalBackend."""
        device = next(iter(self.parameters.values())).device
        return from_rank_0(secret, self.model.process_group, device)

    def stack(self, x: Tensor) -> Tensor:
        """See LocalBackend."""
        return stacked(x, self.model.process_group, next(iter(self.parameters.values())).device)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Reduce once per logical batch, in the backward of its last micro-batch."""
        return nullcontext() if last else self.model.no_sync()
