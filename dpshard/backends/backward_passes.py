"""Detects the start and the end of backward passes."""

from __future__ import annotations

from collections.abc import Callable

import torch


class BackwardPasses:
    """Backward passes with clipped sums."""

    def __init__(self) -> None:
        self.failed = False
        """True if a backward pass did not finish."""
        self._number = -1

    def begins(self, ended: Callable[[], object]) -> bool:
        """Return True if a backward pass begins now; `ended` is called at its end."""
        number = torch._C._current_graph_task_id()
        if number == self._number:
            return False
        self.failed = self.failed or self._number != -1
        self._number = number

        def end() -> None:
            self._number = -1
            ended()

        # Autograd drops the callbacks of a backward that raises.
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True

    def reset(self) -> None:
        """Begin another logical batch."""
        self._number, self.failed = -1, False
