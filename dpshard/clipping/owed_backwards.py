"""Counts forwards without a complete backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

HALFWAY = "its backward failed half-way"


class OwedBackwards:
    """The forwards of one tape, and the backwards that they still need."""

    def __init__(self) -> None:
        self.count = 0
        self._owed: set[int] = set()  # forwards without a backward
        self._used: set[int] = set()  # with a trainable parameter
        self._trained: set[int] = set()  # with records
        self._reached: dict[int, bool] = {}  # by the running backward; True with records
        self._backward = -1

    def begin(self) -> None:
        """Count a forward."""
        self.count += 1
        self._owed.add(self.count)

    def use(self) -> int:
        """Note that the latest forward uses a trainable parameter."""
        self._used.add(self.count)
        return self.count

    def end(self, outputs: Iterable[Any]) -> None:
        """End the latest forward, which owes a backward if it used trainable parameters."""
        if self.count not in self._used:
            self._owed.discard(self.count)
            return
        # A backward to only the inputs brings no records, so hooks on the outputs count it.
        passes = functools.partial(self._pass, self.count)
        for x in outputs:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(passes)

    def _pass(self, forward: int, _: Tensor) -> None:
        self.reach(forward, trained=False)

    def reach(self, forward: int, *, trained: bool) -> None:
        """Note that the running backward reaches a forward."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            self._reached.clear()
            # Autograd drops the callback if the backward raises, so a failed one does not count.
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
        self._reached[forward] = self._reached.get(forward, False) or trained

    def _complete(self) -> None:
        self._owed.difference_update(self._reached)
        self._trained.update(forward for forward, trained in self._reached.items() if trained)
        self._reached.clear()

    @property
    def untrained(self) -> bool:
        """True if forwards used parameters, and no backward brought records."""
        return not self._trained and bool(self._owed or self._used)

    def unfinished(self, *, inputs_suffice: bool) -> str | None:
        """Reason why the micro-batch is incomplete, or None.

        `inputs_suffice`: a backward to only the inputs completes it.
        """
        if any(self._reached.values()):
            return HALFWAY
        if len(self._owed) == self.count > 0:
            return "its forward had no backward"
        if self._owed:
            return f"{len(self._owed)} of its {self.count} forwards had no backward"
        if self.untrained and not inputs_suffice:
            return "only gradients of its inputs were taken"
        return None
