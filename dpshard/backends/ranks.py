"""What a few processes tell each other beside the training: plain values, and what went wrong on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dpshard.errors import DpshardError

T = TypeVar("T")


class Ranks:
    """All processes of the default group, or this one alone. Every method is called by all of them, in one order.

    They talk over a group of their own, on the CPU: a thread may use it while the training goes on.
    """

    def __init__(self) -> None:
        self.alone = not dist.is_available() or not dist.is_initialized()
        self.group: Any = None if self.alone else dist.new_group(backend="gloo")
        self.rank = 0 if self.alone else dist.get_rank()
        self.size = 1 if self.alone else dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Return what `work()` returns on each rank, on every rank; an error of the package on one is raised on all."""
        outcomes = self.gather(_outcome(work))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_first(self, work: Callable[[], T]) -> T:
        """Return what `work()` returns on rank 0, on every rank; an error of the package there is raised on all."""
        outcome = [_outcome(work) if self.first else None]
        if not self.alone:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        assert outcome[0] is not None
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def _outcome(work: Callable[[], T]) -> tuple[T | None, DpshardError | None]:
    try:
        return work(), None
    except DpshardError as error:
        return None, error
