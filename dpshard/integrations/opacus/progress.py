"""Progress of model, optimizer and data loader of one run within their logical batch.

[Note: Opacus's loop on logical batches]
Opacus's loop has one level: zero_grad, forward, backward and step for each item of the loader. Here the loader yields
micro-batches, so steps (and zero_grad) have to wait for the last micro-batch of the logical batch. The loader sets
the current logical batch, the optimizer notes a step that it skipped.
"""

from __future__ import annotations

from dpshard.step.logical_batch import LogicalBatch


class Progress:
    """Shared by the three objects that `make_private` returns."""

    def __init__(self) -> None:
        self.batch: LogicalBatch | None = None
        """The current logical batch of the loader, or the last one."""
        self._skipped_in: LogicalBatch | None = None

    @property
    def unfinished(self) -> bool:
        """True if micro-batches of the logical batch are still to come, so that a step must wait."""
        return self.batch is not None and not self.batch.complete and self.batch.in_progress

    @property
    def collecting(self) -> bool:
        """True if gradients hold clipped sums of an unfinished logical batch, which must not be cleared."""
        return self.batch is not None and self._skipped_in is self.batch and self.batch.in_progress

    def skip(self) -> None:
        """Note that a step was skipped."""
        self._skipped_in = self.batch
