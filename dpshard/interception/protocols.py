"""What the interception asks of those above it: the engine, and the framework that shards the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from dpshard.clipping.tape import Tape
from dpshard.interception.row_identity import RowIdentity
from dpshard.sampling import MicroBatchPlan


class TapeProvider(Protocol):
    """What the interception asks the engine at the start of an outermost forward."""

    two_passes: bool

    @property
    def plan(self) -> MicroBatchPlan | None:
        """The micro-batch that `engine.batches` has handed out, or None in a loop of the user's own."""
        ...

    @property
    def rows(self) -> RowIdentity | None:
        """What watches the rows of that micro-batch."""
        ...

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """The tape for a forward of `batch_size` rows; LogicalBatchError if no forward may come now."""
        ...


class ShardingHooks(Protocol):
    """What the interception must know of a framework that shards parameters."""

    def gathers(self, module: nn.Module) -> bool:
        """Whether hooks around the forward of `module` gather and free its parameters."""
        ...

    def gather(self, module: nn.Module) -> None:
        """Gather the parameters of `module` now."""
        ...

    def dry_run(self) -> AbstractContextManager[Any]:
        """A block of forwards that are not part of the training, and after which no backward comes."""
        ...

    def bind(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors of the parameters that were gathered for `module`, whose forward begins."""
        ...
