"""DeepSpeed's ZeRO-1, 2 and 3: the optimizer steps on flat fp32 partitions, of which every rank holds its own.

[Note: What reaches DeepSpeed]
Anchors hang on dummies, not on parameters, so in a private backward pass no gradient reaches a parameter at all, and
whatever does is a leak and raises. Clipped sums are summed over ranks here ([Note: Why DeepSpeed does not reduce]),
into accumulators laid out as DeepSpeed's fp32 partitions. When DeepSpeed has come to its own optimizer's step (the
hook of step/optimizer_hook.py), the accumulator, noised and divided, takes the place of the partition's gradient.
So averaging, accumulation steps, buckets, communication dtype and stale gradients of DeepSpeed have no say, and
a step that was not privatized has no gradient to step with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpshard.backends.collectives import from_rank_0, meet_for_probe
from dpshard.backends.deepspeed.config import refuse_unsupported, require_no_accumulation
from dpshard.backends.deepspeed.partitions import read_layout
from dpshard.backends.deepspeed.reducer import Reducer, Shape
from dpshard.backends.deepspeed.stage3 import Zero3
from dpshard.backends.deepspeed.state import ZeroState
from dpshard.backends.local import LocalBackend
from dpshard.backends.ranks import stacked
from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.noise.keyed import Shard


class DeepSpeedBackend(LocalBackend):
    """Clipped sums of the module within a DeepSpeedEngine.

    Raises ConfigurationError for what DeepSpeed is configured to do that would not be private, or not be exact.
    """

    def __init__(self, model_engine: Any) -> None:
        self._stage = stage = refuse_unsupported(model_engine)
        super().__init__(model_engine.module)
        self.outermost = model_engine.module
        self.model_engine = model_engine
        self._zero3: Zero3 | None = None
        self._restored: list[Callable[[], object]] = []
        zero = model_engine.optimizer
        self._group = zero.dp_process_group
        try:
            layout = read_layout(zero, {p: name for name, p in self.parameters.items()}, self.rank)
        except Exception:
            self.detach()
            raise
        self._restored = list(_keep_from_reducing(model_engine))
        if stage == 3:
            self._zero3 = Zero3(self.core, zero.parameter_offload, self.parameters)
        device = torch.device(model_engine.device)
        shapes = {
            name: Shape(math.prod(shape), torch.promote_types(p.dtype, torch.float32), device)
            for (name, shape), p in zip(self.shapes.items(), self.parameters.values(), strict=True)
        }
        # Stage 1 has whole gradients on every rank anyway.
        self._reducer = Reducer(layout, shapes, self._group, late=stage == 1)
        self._private: dict[int, Tensor] = {}  # noisy gradients that DeepSpeed has not stepped with yet
        self.two_passes = stage < 3
        self.anchored = {name: torch.zeros(0, device=device, requires_grad=True) for name in self.parameters}

    @property
    def rank(self) -> int:
        """Number of this rank among those that share the data."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Number of ranks that share the data."""
        return dist.get_world_size(self._group)

    @property
    def held(self) -> set[Tensor]:
        """See LocalBackend: the parameters, and the fp32 partitions in their stead."""
        return super().held | set(self._reducer.layout.masters)

    @property
    def shapes(self) -> dict[str, Sequence[int]]:
        """See LocalBackend; stage 3 leaves parameters without elements where they are not in use."""
        return {name: getattr(p, "ds_shape", p.shape) for name, p in self.parameters.items()}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """See LocalBackend."""
        return self.parameters if self._zero3 is None else self._zero3.values

    @property
    def layout(self) -> str:
        """See LocalBackend."""
        return f"ZeRO-{self._stage} on {self.world_size} ranks"

    # --- backward ---------------------------------------------------------------------------------------------------

    def reduce(self, names: Sequence[str], take: Callable[[str], Tensor | None]) -> list[Tensor | None]:
        """See LocalBackend; no gradient is handed to the parameters, see [Note: What reaches DeepSpeed]."""
        require_no_accumulation(self.model_engine)
        if self._begin():
            self._reducer.abandon()  # what a backward pass that failed has left
        for name in reversed(names):
            self._reducer.put(name, take(name))
        return [None] * len(names)

    def _end(self) -> None:
        super()._end()
        self._reducer.finish()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """See LocalBackend; model_engine.step() within the loop steps after the last micro-batch alone."""
        return self._micro_batch(last)

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        if self._managed():
            self.model_engine.set_gradient_accumulation_boundary(last)
        before = self._reducer.passes
        yield
        if self._reducer.passes == before:
            # No backward here, since all rows are padding, say; but perhaps elsewhere.
            self._reducer.finish()
            if self.model_engine.enable_backward_allreduce:
                self.model_engine.allreduce_gradients()

    def _managed(self) -> bool:
        return self.model_engine.managed_gradient_accumulation()

    # --- noise ------------------------------------------------------------------------------------------------------

    def refuse_stale_gradients(self) -> None:
        """See LocalBackend."""
        if self._private:
            raise LogicalBatchError(
                "DeepSpeed has not stepped with the gradient of the last logical batch. Call model_engine.step() "
                "after every logical batch."
            )

    @property
    def _is_unsummed(self) -> bool:
        return True

    def _sum_rest(self) -> None:
        self._reducer.complete()

    def runs_everywhere(self, *, last: bool) -> bool:
        """See LocalBackend: stage 3 gathers parameters in every forward and backward."""
        return self._zero3 is not None

    def _fault(self) -> None:
        return None  # only this back-end has hold of the sums

    def _shards(self) -> list[Shard]:
        return [
            Shard(name, self._reducer.fragment(name), self._reducer.layout.fragments[name].start)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]

    def privatize(self, release_: Callable[[Sequence[Shard]], Tensor]) -> Tensor:
        """See LocalBackend; the result waits for DeepSpeed's step."""
        with torch.no_grad():
            shards = self._shards()
            self._private = self._reducer.take()
            for name, parameter in self.parameters.items():
                if not parameter.requires_grad:
                    self._reducer.fragment(name, self._private).zero_()  # frozen since
            norm = release_(shards)
        self._reset()
        return self._over_shards(norm.square()).sqrt()

    def _over_shards(self, x: Tensor) -> Tensor:
        return self.stack(x.view(1)).sum()

    def install_gradients(self, held: set[Tensor]) -> None:
        """See LocalBackend."""
        for master in held & set(self._reducer.layout.masters):
            gradient = self._private.pop(id(master), None)
            if gradient is None:
                raise LogicalBatchError(
                    "DeepSpeed is about to step without a private gradient: this logical batch was stepped with "
                    "already, or had no backward pass. Call model_engine.step() once per logical batch."
                )
            if master.grad is None:
                master.grad = gradient.to(master.device, master.dtype)
            else:
                master.grad.copy_(gradient)  # it may be a buffer that DeepSpeed keeps

    def full_gradient(self, name: str) -> Tensor | None:
        """See LocalBackend."""
        return self._assembled(name, self._reducer.fragment(name, self._private)) if self._private else None

    def full_value(self, name: str) -> Tensor:
        """See LocalBackend; in the precision of the fp32 partitions."""
        place = self._reducer.layout.fragments[name]
        return self._assembled(name, place.master.detach()[place.offset : place.offset + place.length])

    def _assembled(self, name: str, fragment: Tensor) -> Tensor:
        """All of a tensor of which every rank has the fragment that the layout says."""
        place, shape = self._reducer.layout.fragments[name], self.shapes[name]
        full = torch.zeros(math.prod(shape), dtype=fragment.dtype, device=self.model_engine.device)
        full[place.start : place.start + place.length] = fragment
        dist.all_reduce(full, group=self._group)  # nobody else has these elements
        return full.view(*shape)

    def training_state(self, optimizer: Any) -> ZeroState:
        """See LocalBackend; DeepSpeed's wrapper may stand for the optimizer."""
        zero = self.model_engine.optimizer
        if optimizer is not zero and optimizer is not zero.optimizer:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not the optimizer that DeepSpeed steps with: hand over the one "
                f"that deepspeed.initialize() returns."
            )
        return ZeroState(zero, self.core, self._reducer.layout, self.parameters, self.rank)

    def drop_gradients(self) -> None:
        """See LocalBackend."""
        self._reducer.clear()
        self._private.clear()
        self._reset()

    # --- start and end ----------------------------------------------------------------------------------------------

    def guard_disabled(self) -> AbstractContextManager[Any]:
        """See LocalBackend."""
        stack = ExitStack()
        stack.enter_context(super().guard_disabled())
        if self._zero3 is not None:
            stack.enter_context(self._zero3.beside())
        return stack

    def dry_run(self) -> AbstractContextManager[Any]:
        """See LocalBackend."""
        stack = ExitStack()
        stack.enter_context(super().dry_run())
        if self._zero3 is not None:
            meet_for_probe(self._group)
            stack.enter_context(self._zero3.unmarked())
        return stack

    def gathers(self, module: nn.Module) -> bool:
        """See LocalBackend."""
        return self._zero3 is not None and module is self.core

    def gather(self, module: nn.Module) -> None:
        """See LocalBackend."""
        if self._zero3 is not None:
            self._zero3.gather()

    def share(self, secret: bytes) -> bytes:
        """See LocalBackend."""
        return from_rank_0(secret, self._group, torch.device(self.model_engine.device))

    def stack(self, x: Tensor) -> Tensor:
        """See LocalBackend."""
        return stacked(x, self._group, torch.device(self.model_engine.device))

    def detach(self) -> None:
        """See LocalBackend."""
        super().detach()
        for restore in self._restored:
            restore()
        if self._zero3 is not None:
            self._zero3.detach()
        if self._managed():
            self.model_engine.set_gradient_accumulation_boundary(None)  # DeepSpeed counts by itself again


def _keep_from_reducing(model_engine: Any) -> Iterator[Callable[[], object]]:
    """Spare DeepSpeed the reduction of gradients that never come; yields what undoes it.

    Stages 1 and 2 would fail on a bucket that no gradient was put into, and BF16_Optimizer would sum up zeros.
    """
    zero = model_engine.optimizer
    if hasattr(zero, "reduce_ipg_grads"):
        # Compiled backwards run the hooks of parameters that have no gradient, too.
        for name in ("reduce_ipg_grads", "process_gradients"):
            setattr(zero, name, lambda *_, **__: None)
            yield functools.partial(delattr, zero, name)
    elif hasattr(zero, "bf16_groups"):
        model_engine.enable_backward_allreduce = False
        yield lambda: setattr(model_engine, "enable_backward_allreduce", True)
