"""The parameters of a DeepSpeed model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpshard.backends.communicator import Communicator
from dpshard.backends.deepspeed.partitions import read_layout
from dpshard.backends.deepspeed.stage3 import Zero3
from dpshard.backends.deepspeed.state import ZeroState
from dpshard.backends.sharding import Sharding
from dpshard.errors import ConfigurationError


class ZeroSharding(Sharding):
    """The parameters of a DeepSpeedEngine; raises ConfigurationError if its layout is unknown."""

    def __init__(self, model_engine: Any, stage: int) -> None:
        super().__init__(model_engine.module, model_engine.module)
        self.compute_device = torch.device(model_engine.device)
        self._zero = zero = model_engine.optimizer
        group = zero.dp_process_group
        self.communicator = Communicator(dist.get_world_size(group), lambda: group, self.compute_device)
        self._zero3: Zero3 | None = None
        try:
            names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
            self.layout = read_layout(zero, names, self.communicator.rank)
            if stage == 3:
                self._zero3 = Zero3(self.core, zero.parameter_offload, self.parameters)
        except Exception:
            self.detach()
            raise
        self.two_passes = stage < 3
        self.anchored = {
            name: torch.zeros(0, device=self.compute_device, requires_grad=True) for name in self.parameters
        }

    @property
    def held(self) -> set[Tensor]:
        """The parameters, and the partitions in their place."""
        return super().held | set(self.layout.masters)

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Whole shapes; stage 3 empties unused parameters."""
        return {name: getattr(p, "ds_shape", p.shape) for name, p in self.parameters.items()}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The parameters that forward uses."""
        return self.parameters if self._zero3 is None else self._zero3.values

    # --- forward

    def unshards(self, module: nn.Module) -> bool:
        """Return True for the outermost module in stage 3."""
        return self._zero3 is not None and module is self.core

    def unshard_module(self, module: nn.Module) -> None:
        """Unshard the outermost module's parameters."""
        if self._zero3 is not None:
            self._zero3.unshard()

    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return nothing: DeepSpeed unshards in place."""
        return ()

    def _isolated(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._zero3 is None else self._zero3.isolated()

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._zero3 is None:
            yield
            return
        self.communicator.meet()
        with self._zero3.unmarked():
            yield

    # --- shards

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole tensor; all ranks call it, in one order."""
        place, shape = self.layout.fragments[name], self.shapes[name]
        full = torch.zeros(math.prod(shape), dtype=shard.dtype, device=self.compute_device)
        full[place.start : place.start + place.length] = shard
        dist.all_reduce(full, group=self.communicator.group)  # fragments do not overlap
        return full.view(*shape)

    def full_value(self, name: str) -> Tensor:
        """Whole parameter, in the precision of the partitions."""
        place = self.layout.fragments[name]
        return self.unshard(name, place.master.detach()[place.offset : place.offset + place.length])

    def over_shards(self, x: Tensor) -> Tensor:
        """Sum over different shards of the data ranks."""
        return self.communicator.all_gather(x.view(1)).sum()

    def training_state(self, optimizer: Any) -> ZeroState:
        """Return model and `optimizer` for a checkpoint."""
        zero = self._zero
        if optimizer is not zero and optimizer is not zero.optimizer:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not the optimizer that DeepSpeed steps with. Pass the one that "
                f"deepspeed.initialize() returns."
            )
        return ZeroState(zero, self.core, self.layout, self.parameters, self.communicator.rank)

    def detach(self) -> None:
        """Remove all hooks."""
        super().detach()
        if self._zero3 is not None:
            self._zero3.detach()
