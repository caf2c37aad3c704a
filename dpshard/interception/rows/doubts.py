"""Findings against a logical batch, noted when seen, and raised before the noise at the latest.

[Note: When a doubt is told]
To read a flag, the host waits for its accelerator, and a rank that raises by itself leaves the others in a collective.
So only a single process on a CPU raises at once, with a traceback to the cause. Otherwise flags stay on their device
until the release, which waits anyway; all ranks then learn the findings of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from dpshard.errors import LogicalBatchError

_UNPADDED = (
    "or call engine.batches(..., pad=False): its last micro-batches have as many rows as samples, in whatever order"
)


class Doubt(Enum):
    """A finding; its value is the text of the error."""

    FILLER = (
        "Rows that pad a micro-batch came to the model with other values than its last sample, of which "
        "engine.batches(...) has made them copies. So rows were shuffled, sorted, or augmented in the loop, or they "
        "come from other data, or from a micro-batch before the one that was fetched last, and nobody knows any more "
        "which rows are padding. Sort and augment in the data set or "
        f"in collate_fn, {_UNPADDED}."
    )
    SHUFFLED = (
        "The model got the rows of a padded micro-batch in another order than engine.batches(...) has handed them "
        f"out, so padding would count as samples. Sort rows in the data set or in collate_fn, {_UNPADDED}."
    )
    SCATTERED = (
        "The model got the rows of units in another order than engine.batches(...) has handed them out, so rows of "
        "several units would be clipped as one. Keep the rows of a unit side by side (no list of first rows before one "
        "of second rows), in the loop as in collate_fn."
    )
    REPEATED = (
        "One row that engine.batches(...) has handed out came to the model in two rows of its micro-batch: in place of "
        "a corrupt row, say, or because equal rows were merged and others repeated. So that sample has two gradients, "
        "and clipping does not bound it. Leave every sample in one row; one that cannot be read may be blank."
    )
    TRANSPOSED = (
        "The first two dimensions of what engine.batches(...) has handed out were swapped, and as both are of one "
        "length, positions were taken for samples, while each holds a part of all of them. Give the model samples "
        "first, and transpose in its forward, or choose a micro_batch_size that is no other dimension of the data."
    )
    REORDERED = (
        "Two forwards of one micro-batch got, or returned, the same rows in different orders. All forwards of a "
        "micro-batch share one gradient a row, so that samples would be mixed before they are clipped. Keep one order "
        "from the first forward to the last, or sort in the data set or in collate_fn."
    )
    MASKED = (
        "The rows that pad a micro-batch have no gradient, while the sample of which they are copies has one. So the "
        "loss leaves them out, and a mean over the other rows divides by their number, which is private. Take the mean "
        "over all rows, loss.mean(), as loss_reduction='mean' says: the engine cuts padding off."
    )
    UNLIKE = (
        "Rows that pad a micro-batch are copies of its last sample, and torch drew no random numbers, yet their "
        "gradients have other norms. So the loss takes labels in another order than inputs, or weighs a row by its "
        "position or by other rows (or random numbers are drawn beside torch). Keep labels and inputs in the order in "
        f"which they come, {_UNPADDED}."
    )
    SILENT = (
        "No sample of one micro-batch has a gradient, while all samples of others have one, in earlier steps as well. "
        "So a loss was switched off, clamped or repaired for the whole micro-batch (0 * loss, loss.clamp(max=...), "
        "torch.nan_to_num(loss)), and one sample there decides about all others. Leave it as it is: a sample without "
        "a finite gradient contributes 0 by itself, and large ones are clipped. Or do it row by row, before the mean. "
        "If samples of yours have no gradient of their own (ignored labels, a hinge), put the data set in random order."
    )


class Doubts:
    """Doubts about one logical batch; see [Note: When a doubt is told]."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._flags: list[tuple[Doubt, Tensor]] = []

    def note(self, doubt: Doubt, flag: Tensor, *, wait: bool = False) -> None:
        """Note the finding `flag` (bool []); LogicalBatchError at once if possible and not `wait`."""
        if self._at_once and not wait and flag.device.type == "cpu":
            if bool(flag):
                raise LogicalBatchError(doubt.value)
            return
        self._flags.append((doubt, flag))

    def flags(self, device: torch.device) -> Tensor:
        """Return the findings, int64 [kinds of doubt], on `device`."""
        if not self._flags:
            return torch.zeros(len(Doubt), dtype=torch.int64, device=device)
        blank = torch.zeros((), dtype=torch.bool, device=device)
        per_kind = [[flag.to(device) for kind, flag in self._flags if kind is doubt] for doubt in Doubt]
        return torch.stack([torch.stack([blank, *flags]).any() for flags in per_kind]).long()

    @staticmethod
    def refuse(found: Sequence[int]) -> None:
        """Raise LogicalBatchError for the first doubt `found`."""
        for doubt, flag in zip(Doubt, found, strict=False):  # `found` is empty if nothing was noted
            if flag:
                raise LogicalBatchError(doubt.value)
