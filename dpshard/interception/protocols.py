"""Protocols of the step in progress, and of the framework that shards parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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

    def forward(self, module: nn.Module) -> AbstractContextManager[bool]:
        """Return a block for an outermost forward; in it False if the forward is outside of training."""
        ...

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """Return the tape for a forward of `batch_size` rows; LogicalBatchError if a forward is out of place."""
        ...


class Exchange(Protocol):
    """Ranks that hold parts of one model, and send each other rows. They see the same samples, or each has its own."""

    of_samples: bool
    """See clipping.parts.Parts."""

    def knows(self, group: str) -> bool:
        """Return True if the group of this name has these ranks."""
        ...

    def send_samples(
        self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int], batch_size: int
    ) -> Tensor | None:
        """Send the samples of rows after them, and return those of the rows that arrive.

        None if rows return to a rank that did not send them.

        `received`, `sent`: numbers of rows by rank. With `of_samples`, numbers from B on are rows of other ranks.
        """
        ...

    def sample_count(self, batch_size: int, names: Collection[str]) -> int:
        """Return the number of samples whose rows meet these parameters: of one rank, or of all."""
        ...

    def sample_numbers(self, sample_N: Tensor | None, batch_size: int, names: Collection[str]) -> Tensor | None:
        """Return the samples of rows as records of these parameters number them; None for rows that they cannot meet.

        `sample_N`: None for rows that are not routed.
        """
        ...


class ShardingHooks(Protocol):
    """A framework that may shard parameters."""

    @property
    def exchange(self) -> Exchange | None:
        """The ranks that hold parts of the model, or None."""
        ...

    @property
    def note_inputs(self) -> Callable[[Iterable[Tensor]], None] | None:
        """Takes the inputs of a forward, if other ranks must have the same; else None."""
        ...

    @property
    def passes_rows(self) -> bool:
        """True if other ranks take the output, and its first dimension for the samples."""
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
