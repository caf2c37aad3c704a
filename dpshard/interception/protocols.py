"""Protocols of the step in progress, and of the framework that shards parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from dpshard.clipping.tape import Tape
from dpshard.interception.rows import OwnLoopRows, RowIdentity
from dpshard.sampling import MicroBatchPlan, PackedTokens


class TapeProvider(Protocol):
    """The step in progress, at the start of an outermost forward."""

    two_passes: bool

    @property
    def plan(self) -> MicroBatchPlan | None:
        """The micro-batch from `engine.batches`; None in a user's own loop."""
        ...

    @property
    def rows(self) -> RowIdentity | OwnLoopRows | None:
        """The check of that micro-batch's rows, or of those of a user's own loop."""
        ...

    @property
    def packed(self) -> PackedTokens | None:
        """The units of the tokens, if the forward is on packed rows."""
        ...

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """Return the tape for a forward of `batch_size` rows; LogicalBatchError if a forward is out of place."""
        ...


class ShardingHooks(Protocol):
    """A framework that may shard parameters."""

    @property
    def note_inputs(self) -> Callable[[Iterable[Tensor]], None] | None:
        """Takes the inputs of a forward, if other ranks must have the same; else None."""
        ...

    def unshards(self, module: nn.Module) -> bool:
        """Return True if hooks around the forward of `module` gather and free its parameters."""
        ...

    def unshard_module(self, module: nn.Module) -> None:
        """Gather the parameters of `module` now."""
        ...

    def dry_run(self) -> AbstractContextManager[Any]:
        """Return a block of forwards without backward, outside training."""
        ...

    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors of the parameters gathered for `module`, at the start of its forward."""
        ...
