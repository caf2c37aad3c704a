"""How far model, optimizer and data loader of one run are along their logical batch.

[Note: Opacus's loop on logical batches]
Such a loop has one level: zero_grad, forward, backward and step for whatever the loader yields. Here the loader yields
micro-batches, so steps (and zero_grad) have to wait until all micro-batches of the logical batch were handed out. The
loader says which logical batch it is in, the optimizer whether it has skipped a step within it.
"""

from __future__ import annotations

from dpshard.step.logical_batch import LogicalBatch


class Progress:
    """Shared by the three objects that `make_private` returns."""

    def __init__(self) -> None:
        self.batch: LogicalBatch | None = None
        """The logical batch that the loader is in, or the last one."""
        self._skipped_in: LogicalBatch | None = None

    @property
    def unfinished(self) -> bool:
        """Whether micro-batches of the logical batch are still to come, so that a step must wait."""
        return self.batch is not None and not self.batch.complete and self.batch.in_progress

    @property
    def collecting(self) -> bool:
        """Whether gradients hold clipped sums of a logical batch to which more will be added: nobody may clear them."""
        return self.batch is not None and self._skipped_in is self.batch and self.batch.in_progress

    def skip(self) -> None:
        """Note that a step was skipped."""
        self._skipped_in = self.batch
