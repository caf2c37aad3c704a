"""The interfaces of the step in progress and of a sharding framework, which interception uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from dpshard.clipping.tape import Tape
from dpshard.interception.rows import OwnLoopRows, RowIdentity
from dpshard.sampling import MicroBatchPlan, PackedTokens


class TapeProvider(Protocol):
    """The step in progress, which provides the tape."""

    two_passes: bool

    @property
    def plan(self) -> MicroBatchPlan | None:
        """The plan of the micro-batch; None in a user's own loop."""
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
        """Return a block for an outermost forward. Its value is False if the forward is not part of training."""
        ...

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """Return the tape; LogicalBatchError if the forward is out of place."""
        ...


class Exchange(Protocol):
    """Ranks that hold parts of one model, and send each other rows."""

    of_samples: bool
    """True if each rank has B samples of its own; see clipping.parts.Parts."""

    def knows(self, group: str) -> bool:
        """Return True if the process group of this name has these ranks."""
        ...

    def send_samples(
        self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int], batch_size: int
    ) -> Tensor | None:
        """Return the samples of the rows that arrive; None if rows return to a rank that did not send them.

        `received`, `sent`: number of rows by rank. With `of_samples`, samples of other ranks have numbers from B on.
        """
        ...

    def sample_count(self, batch_size: int, names: Collection[str]) -> int:
        """Return the number of samples, of one or of all ranks, whose rows meet these parameters."""
        ...

    def sample_numbers(self, sample_N: Tensor | None, batch_size: int, names: Collection[str]) -> Tensor | None:
        """Return the samples' numbers in the records of these parameters; None for rows that they cannot get.

        `sample_N`: None for unrouted rows.
        """
        ...


class ShardingHooks(Protocol):
    """A framework that may shard parameters."""

    @property
    def exchange(self) -> Exchange | None:
        """The exchange between ranks with parts of the model, or None."""
        ...

    @property
    def note_inputs(self) -> Callable[[Iterable[Tensor]], None] | None:
        """A function that takes the inputs, if other ranks must have the same; else None."""
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
