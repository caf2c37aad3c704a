"""The logical batch: the micro-batches between two optimizer steps, and how far along it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpshard.clipping.tape import Tape
from dpshard.errors import LogicalBatchError
from dpshard.interception import RowIdentity
from dpshard.sampling import MicroBatchPlan

Loaded = Iterator[tuple[MicroBatchPlan, Any]]
"""Plans of micro-batches, each with its data."""


@dataclass(slots=True)
class MicroBatch:
    """The micro-batch that the script is working on."""

    plan: MicroBatchPlan
    data: Any
    """What was handed out."""
    tape: Tape | None = None
    """Shared by all forwards on this micro-batch: a sample has one gradient and one factor."""
    rows: RowIdentity | None = None
    """Watches that its rows stay its samples."""


class LogicalBatch:
    """The micro-batches of one step; iterate over it once, then call `optimizer.step()`."""

    def __init__(
        self,
        plan: MicroBatchPlan,
        data: Any,
        loaded: Loaded,
        working: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self.step = plan.step
        """Number of the step, from 0."""
        self.position = 0
        """Micro-batches handed out so far."""
        self.samples = 0
        """Samples in them, on this rank."""
        self.released = False
        """Whether the noisy sum of this batch has reached the gradients."""
        self.micro: MicroBatch | None = None
        self.abandoned = False
        """Whether the loop over logical batches has ended, or another has begun, before this one was through."""
        self._count = plan.count
        self._first = (plan, data)
        self._loaded = loaded
        self._working = working

    def __len__(self) -> int:
        """Number of micro-batches K, equal on all ranks, at least 1."""
        return self._count

    def __iter__(self) -> Iterator[Any]:
        """The data of each micro-batch, as the data set and collate_fn give it."""
        if self.position:
            raise LogicalBatchError("A logical batch can be iterated once: its samples would count twice.")
        while not self.complete:
            if self.abandoned:
                raise LogicalBatchError(
                    "The iterator of engine.batches(...) that this logical batch comes from is gone, so the engine no "
                    "longer knows which rows are padding. Keep it: `batches = engine.batches(...)`, `next(batches)`."
                )
            plan, data = self._first if self.position == 0 else next(self._loaded)
            self.position += 1
            self.samples += plan.samples
            self.micro = MicroBatch(plan, data)
            with self._working(last=self.complete):
                yield data
        self.micro = None

    @property
    def is_padding(self) -> Tensor:
        """Bool [B], on the CPU: the rows of the current micro-batch that are padding and contribute nothing."""
        if self.micro is None:
            raise LogicalBatchError("is_padding belongs to a micro-batch: read it within the loop over them.")
        return self.micro.plan.is_padding

    @property
    def complete(self) -> bool:
        """Whether all micro-batches were handed out."""
        return self.position == self._count

    def require_release(self) -> None:
        """Raise LogicalBatchError unless the batch was released: the sampler moves on with the release alone."""
        self.micro = None
        if not self.released:
            raise LogicalBatchError(
                f"The logical batch of step {self.step} was not released: call optimizer.step() after its "
                f"micro-batches (also if it is empty), then optimizer.zero_grad(). If it was called, the "
                f"optimizer holds none of the engine's parameters: make it of model.parameters(), after "
                f"fully_shard, which replaces them."
            )
