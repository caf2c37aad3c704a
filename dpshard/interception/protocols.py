"""What the step in progress and a sharding framework bring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from dpshard.clipping.tape import Tape
from dpshard.interception.rows import OwnLoopRows, RowIdentity
from dpshard.sampling import MicroBatchPlan, PackedTokens


class TapeProvider(Protocol):
    """The step in progress."""

    two_passes: bool

    @property
    def plan(self) -> MicroBatchPlan | None:
        """None in a user's own loop."""
        ...

    @property
    def rows(self) -> RowIdentity | OwnLoopRows | None:
        """The check of the rows."""
        ...

    @property
    def packed(self) -> PackedTokens | None:
        """The units of packed rows."""
        ...

    def forward(self, module: nn.Module) -> AbstractContextManager[bool]:
        """Return a block for an outermost forward; in it False outside of training."""
        ...

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """Return the tape; LogicalBatchError if the forward is out of place."""
        ...


class Exchange(Protocol):
    """Ranks that hold parts of one model, and send each other rows."""

    of_samples: bool
    """See clipping.parts.Parts."""

    def knows(self, group: str) -> bool:
        """Return True if the group has these ranks."""
        ...

    def send_samples(
        self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int], batch_size: int
    ) -> Tensor | None:
        """Return the samples of the rows that arrive; None if rows return to a rank that did not send them.

        `received`, `sent`: numbers of rows by rank. With `of_samples`, numbers from B on are rows of other ranks.
        """
        ...

    def sample_count(self, batch_size: int, names: Collection[str]) -> int:
        """Return the number of samples, of one or of all ranks, whose rows meet these parameters."""
        ...

    def sample_numbers(self, sample_N: Tensor | None, batch_size: int, names: Collection[str]) -> Tensor | None:
        """Return the samples as these parameters' records number them; None for rows that they cannot meet.

        `sample_N`: None for unrouted rows.
        """
        ...


class ShardingHooks(Protocol):
    """A framework that may shard parameters."""

    @property
    def exchange(self) -> Exchange | None:
        """Ranks with parts of the model."""
        ...

    @property
    def note_inputs(self) -> Callable[[Iterable[Tensor]], None] | None:
        """Takes the inputs, if other ranks must have the same."""
        ...

    @property
    def passes_rows(self) -> bool:
        """True if other ranks take the output's first dimension for the samples."""
        ...

    def unshards(self, module: nn.Module) -> bool:
        """Return True if hooks gather and free the parameters of `module`."""
        ...

    def unshard_module(self, module: nn.Module) -> None:
        """Gather the parameters of `module`."""
        ...

    def dry_run(self) -> AbstractContextManager[Any]:
        """Return a block of forwards without backward."""
        ...

    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors of gathered parameters."""
        ...
