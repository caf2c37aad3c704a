"""Findings against a logical batch, raised before the noise at the latest.

A rank that raises by itself would leave the others waiting in a collective. Reading a flag waits for the accelerator.
So only a single process on a CPU raises at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from dpshard.errors import LogicalBatchError

_UNPADDED = "or call engine.batches(..., pad=False): its last micro-batches have a row per sample, in any order"


class Doubt(Enum):
    """Kinds of findings; the values are the texts of errors."""

    FILLER = (
        f"The padding rows of a micro-batch are copies of its last sample, but they reached the model with other "
        f"values. So the loop shuffled, sorted or augmented rows, or took them from other data or from an earlier "
        f"micro-batch. It is unknown which rows are padding. Sort and augment in the data set or in collate_fn, "
        f"{_UNPADDED}."
    )
    SHUFFLED = (
        "The model got the rows of a padded micro-batch in another order than engine.batches(...) handed them out, so "
        f"padding would count as samples. Sort rows in the data set or in collate_fn, {_UNPADDED}."
    )
    SCATTERED = (
        "The model got the rows of units in another order than engine.batches(...) handed them out, so rows of several "
        "units would be clipped as one. Keep the rows of a unit adjacent, in the loop and in collate_fn (no list of "
        "first rows before one of second rows)."
    )
    REPEATED = (
        "One row that engine.batches(...) handed out reached the model in two rows of its micro-batch: it replaced a "
        "corrupt row, for example, or equal rows were merged and others repeated. So that sample has two gradients, "
        "and clipping does not bound it. Keep every sample in one row; a row that cannot be read may be blank."
    )
    TRANSPOSED = (
        "The loop swapped the first two dimensions of a batch from engine.batches(...). Both have the same length, so "
        "dpshard took positions for samples, but each position holds a part of every sample. Give the model samples "
        "first, and transpose in its forward, or choose a micro_batch_size that no other dimension of the data has."
    )
    REORDERED = (
        "Two forwards of one micro-batch got, or returned, the same rows in different orders. All forwards of a "
        "micro-batch share one gradient per row, so samples would be mixed before they are clipped. Keep one order in "
        "all forwards, or sort in the data set or in collate_fn."
    )
    MASKED = (
        "The rows that pad a micro-batch have no gradient, but the sample that they copy has one. So the loss leaves "
        "them out, and a mean over the other rows divides by their number, which is private. Take the mean over all "
        "rows, loss.mean(), as loss_reduction='mean' says: the engine cuts padding off."
    )
    UNLIKE = (
        f"Rows that pad a micro-batch are copies of its last sample, and torch drew no random numbers, but their "
        f"gradients have other norms. So the labels are in another order than the inputs, or the loss weighs a row by "
        f"its position or by other rows (or random numbers come from outside torch). Do not reorder labels and inputs, "
        f"{_UNPADDED}."
    )
    CHANGED = (
        "A record that returned from host memory is not the one that was measured (offload_records), so the samples' "
        "norms do not hold for it. Its sum was left out, and nothing was released. The copies, the driver or a memory "
        "module are at fault, or code that writes to activations in backward. Please report it with the output of "
        "`dpshard doctor`, and train without offload_records."
    )
    SPREAD = (
        "Several units of one packed row have no finite gradient. Attention multiplies the values of other units by 0, "
        "and 0 * inf is NaN. So one unit whose activations overflow takes the gradients of its neighbours away, and "
        "would count for all of them. Find the overflow (half precision, an unbounded activation). Or train without "
        "packing, where such a sample only loses its own gradient."
    )
    SILENT = (
        "No sample of one micro-batch has a gradient, but all samples of others have one, also in earlier steps. "
        "So a loss was switched off, clamped or repaired for the whole micro-batch (0 * loss, loss.clamp(max=...), "
        "torch.nan_to_num(loss)), and one sample decided about all others. Leave the loss as it is: a sample without "
        "a finite gradient contributes 0, and large gradients are clipped. Or do it row by row, before the mean. "
        "If some samples have no gradient (ignored labels, a hinge), put the data set in random order."
    )


class Doubts:
    """The findings against one logical batch."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._flags: list[tuple[Doubt, Tensor]] = []

    def note(self, doubt: Doubt, flag: Tensor, *, wait: bool = False) -> None:
        """Note a finding (bool []). Raises LogicalBatchError at once if possible, unless `wait`."""
        if self._at_once and not wait and flag.device.type == "cpu":
            if bool(flag):
                raise LogicalBatchError(doubt.value)
            return
        self._flags.append((doubt, flag))

    def flags(self, device: torch.device) -> Tensor:
        """Return 1 for each kind of doubt that was found, else 0; int64 [kinds of doubt]."""
        if not self._flags:
            return torch.zeros(len(Doubt), dtype=torch.int64, device=device)
        blank = torch.zeros((), dtype=torch.bool, device=device)
        per_kind = [[flag.to(device) for kind, flag in self._flags if kind is doubt] for doubt in Doubt]
        return torch.stack([torch.stack([blank, *flags]).any() for flags in per_kind]).long()

    @staticmethod
    def refuse(found: Sequence[int]) -> None:
        """Raise LogicalBatchError for the first doubt `found`."""
        for doubt, flag in zip(Doubt, found, strict=False):  # empty if nothing was noted
            if flag:
                raise LogicalBatchError(doubt.value)
