"""The micro-batches between two optimizer steps, and the states of their gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.clipping.tape import Tape
from dpshard.errors import ConfigurationError, LogicalBatchError, UnknownLengthError
from dpshard.interception import Doubts, PartIdentity, RowIdentity, Together
from dpshard.sampling import MicroBatchPlan, PackedTokens


class BatchState(Enum):
    """State of the gradients of the logical batch (a lot in Abadi et al. 2016, arXiv:1607.00133).

        event                                    from                to           epoch
        `batches` hands out a logical batch      EMPTY, PRIVATIZED   EMPTY
        a backward delivers clipped sums         all but CLOSED      COLLECTING
        own loop: release                        COLLECTING          PRIVATIZED
        own loop: refused without a backward     COLLECTING          EMPTY        + 1
        own loop: failed after it was counted    COLLECTING          EMPTY        + 1
        logical batch: release                   EMPTY, COLLECTING   PRIVATIZED   + 1
        logical batch: left early                EMPTY, COLLECTING   EMPTY        + 1
        `batches` begins; `restart`              all but CLOSED      EMPTY        + 1
        `close`                                  all                 CLOSED       + 1

    Logical batches and tapes are valid in the epoch in which they were made.
    """

    EMPTY = auto()
    COLLECTING = auto()
    PRIVATIZED = auto()  # noise is in: gradients are safe
    CLOSED = auto()  # the engine was detached


Loaded = Iterator[tuple[MicroBatchPlan, Any]]

TICKS = itertools.count()
"""Order in time of engines and micro-batches of this process."""


class Feed:
    """The one consumer of loaded micro-batches: loops peek, logical batches take."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._next: tuple[MicroBatchPlan, Any] | None = None

    def peek(self) -> MicroBatchPlan | None:
        """Plan of the next micro-batch, if any."""
        if self._next is None:
            self._next = next(self._loaded, None)
        return None if self._next is None else self._next[0]

    def take(self) -> tuple[MicroBatchPlan, Any]:
        """Next micro-batch."""
        taken, self._next = self._next, None
        return next(self._loaded) if taken is None else taken


@dataclass(slots=True, eq=False)
class MicroBatch:
    """The current micro-batch of the script."""

    plan: MicroBatchPlan
    data: Any
    tape: Tape | None = None
    """Tape of all forwards: a sample has one gradient and one clip coefficient."""
    rows: RowIdentity | None = None
    """Checks that rows remain samples."""
    packed: PackedTokens | None = None
    """The units of packed rows' tokens."""
    chunks: list[MicroBatch | None] = field(default_factory=list)
    """Parts in a pipeline, each with a tape; None without a forward."""
    together: Together | None = None
    """The inputs of all parts."""
    index: int = 0
    tick: int = field(default_factory=TICKS.__next__)

    def identity(self, doubts: Doubts, *, mean: bool) -> RowIdentity:
        """Return the check of its rows."""
        if self.rows is None:
            make = RowIdentity
            if self.together is not None:
                make = functools.partial(PartIdentity, index=self.index, together=self.together)
            self.rows = make(self.plan, self.data, doubts, mean=mean)
        return self.rows

    def chunk(self, index: int, count: int) -> MicroBatch:
        """Return part `index` of `count`; raise ConfigurationError if samples cannot be divided so."""
        plan = self.plan
        if plan.placement is not None or len(plan.indices) % count or len(self.chunks) not in (0, count):
            raise ConfigurationError(
                f"A schedule of {count} micro-batches divides the {len(plan.indices)} samples that engine.batches "
                f"hands out. micro_batch_size must be a multiple of {count}, the same in each step() on it, without "
                f"packing and pad=False."
            )
        if self.together is None:
            self.chunks, self.together = [None] * count, Together(plan, self.data, count)
        found = self.chunks[index]
        if found is None:
            rows = len(plan.indices) * plan.rows_per_unit
            size = rows // count
            part = functools.partial(_rows_of, rows=rows, some=slice(index * size, (index + 1) * size))
            found = self.chunks[index] = MicroBatch(
                plan.chunk(index, count), pytree.tree_map(part, self.data), together=self.together, index=index
            )
        return found

    @property
    def unfinished(self) -> str | None:
        """Reason why it is incomplete, or None."""
        if self.chunks:
            reasons = [_NOT_CALLED if chunk is None else chunk.unfinished for chunk in self.chunks]
            return next((f"part {i + 1} of {len(reasons)}: {why}" for i, why in enumerate(reasons) if why), None)
        if self.tape is None:
            return _NOT_CALLED
        return self.tape.unfinished

    @property
    def untrained(self) -> bool:
        """True if no backward came, so other ranks may wait in theirs. A schedule has ended on all ranks."""
        return not self.chunks and (self.tape is None or self.tape.forwards.untrained)


_NOT_CALLED = "the model was not called on it in training mode"


def _rows_of(x: Any, rows: int, some: slice) -> Any:
    return x[some] if isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows else x


_NO_MICRO_BATCH = (
    "engine.batches(...) yields logical batches, and this one was used like a micro-batch. Loop over the micro-batches "
    "in it: `for logical_batch in engine.batches(...): for x, y in logical_batch: ...`, and step after the inner loop."
)


class LogicalBatch:
    """The micro-batches of one step; iterate over it once, then call `optimizer.step()`."""

    def __init__(
        self,
        plan: MicroBatchPlan,
        feed: Feed,
        now: Callable[[], int],
        working: Callable[..., AbstractContextManager[Any]],
        ended: Callable[[MicroBatch], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._feed = feed
        self._now = now
        self._epoch = now()
        self._working, self._ended = working, ended
        self._position = 0
        self._samples = 0
        self._micro: MicroBatch | None = None
        self._behind: list[MicroBatch] = []  # unfinished when the next one began

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self._plan.step

    @property
    def position(self) -> int:
        """Micro-batches handed out so far. No loss may use it: it depends on the draw."""
        return self._position

    @property
    def samples(self) -> int:
        """This rank's samples handed out so far. No loss may use it: it depends on the draw."""
        return self._samples

    @property
    def complete(self) -> bool:
        """True if all were handed out."""
        return self._position == self._plan.count

    @property
    def in_progress(self) -> bool:
        """True if the batch was neither released nor left."""
        return self._epoch == self._now()

    @property
    def micro(self) -> MicroBatch | None:
        """Current micro-batch; None between two."""
        return self._micro

    @property
    def is_padding(self) -> Tensor:
        """Bool [B], on the CPU: padding rows of the current micro-batch, which contribute nothing.

        No loss may use their number, which depends on the draw.
        """
        if self._micro is None:
            raise LogicalBatchError("is_padding belongs to a micro-batch: read it within the loop over them.")
        return self._micro.plan.rows_are_padding

    def __len__(self) -> NoReturn:
        """Refuse: the number depends on the draw."""
        raise UnknownLengthError(
            "A logical batch has no len(): the number of its micro-batches depends on which samples were drawn. A loss "
            "divided by it would make every gradient depend on all samples, before clipping. Do not divide: the "
            "engine divides the sum by the expected batch size, engine.mechanism.schedule[logical_batch.step]. "
            "`logical_batch.complete` is True within the last micro-batch."
        )

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse: it is not a micro-batch."""
        raise LogicalBatchError(_NO_MICRO_BATCH)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse: it is not a tensor."""
        raise LogicalBatchError(_NO_MICRO_BATCH)

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of each micro-batch."""
        if self._position:
            raise LogicalBatchError(
                "A logical batch can be iterated only once: its samples would count twice. To restart it after an "
                "error, leave the loop and call engine.batches(...) again. It draws the same samples, at no cost."
            )
        while not self.complete:
            if not self.in_progress:
                raise LogicalBatchError(
                    "The iterator of engine.batches(...) that made this logical batch is gone, so it is unknown which "
                    "rows are padding. Keep it: `batches = engine.batches(...)`, `next(batches)`."
                )
            plan, data = self._feed.take()
            self._position += 1
            self._samples += plan.samples
            self._micro = MicroBatch(plan, data)
            with self._working(last=self.complete):
                yield data
            self.end_micro_batch()

    def progress(self) -> str:
        """Return the progress, for errors only: no loss may use it, because it depends on the draw."""
        return f"{self._position} of the {self._plan.count} micro-batches"

    def end_micro_batch(self) -> None:
        """End the current micro-batch; its backward may follow."""
        micro, self._micro = self._micro, None
        if micro is None:
            return
        self._ended(micro)
        if micro.unfinished:
            self._behind.append(micro)

    def unfinished(self) -> list[tuple[MicroBatch, str]]:
        """Incomplete micro-batches so far, with reasons."""
        current = [] if self._micro is None else [self._micro]
        return [(micro, why) for micro in [*self._behind, *current] if (why := micro.unfinished)]
