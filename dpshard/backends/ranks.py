"""Exchange of plain values and errors between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dpshard.errors import DpshardError

T = TypeVar("T")


class Ranks:
    """All processes, or only this one; all call every method, in one order.

    A CPU group of their own lets threads use it.
    """

    def __init__(self) -> None:
        self.alone = not dist.is_available() or not dist.is_initialized()
        self.group: Any = None if self.alone else dist.new_group(backend="gloo")
        self.rank = 0 if self.alone else dist.get_rank()
        self.size = 1 if self.alone else dist.get_world_size()

    @property
    def first(self) -> bool:
        """True for rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Values of all ranks."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Results of `work()` on all ranks. If one raises a DpshardError, all raise it."""
        outcomes = self.gather(_outcome(work))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_first(self, work: Callable[[], T]) -> T:
        """Return the result of rank 0. If it raises a DpshardError, all raise it."""
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
