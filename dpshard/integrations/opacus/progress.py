"""Progress of a run within its logical batch.

Opacus's loop steps for each item of the loader. Here items are micro-batches, so step and zero_grad wait for the last
one of the logical batch.
"""

from __future__ import annotations

from dpshard.step.logical_batch import LogicalBatch


class Progress:
    """The progress that the three objects of `make_private` share."""

    def __init__(self) -> None:
        self.batch: LogicalBatch | None = None
        """The logical batch that the loader yielded last."""
        self._skipped_in: LogicalBatch | None = None

    @property
    def unfinished(self) -> bool:
        """True if micro-batches are still to come."""
        return self.batch is not None and not self.batch.complete and self.batch.in_progress

    @property
    def collecting(self) -> bool:
        """True if gradients hold clipped sums of an unfinished logical batch."""
        return self.batch is not None and self._skipped_in is self.batch and self.batch.in_progress

    def skip(self) -> None:
        """Note a skipped step."""
        self._skipped_in = self.batch
