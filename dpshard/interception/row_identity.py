"""Whether row i of a micro-batch stays row i of its samples, whatever a loop does between two forwards.

[Note: Rows are samples by their number]
All forwards of a micro-batch share a tape, on which row i is sample i, or padding. A loop may break this: it sorts rows
by length, shuffles them, or takes rows from elsewhere. Nobody sees the loop, but there is evidence:
- padding rows are copies of the last sample: in every input of every forward they still equal it, up to the rounding
  of what was computed of them, and to the dropout of a part of the model that was called before;
- rows that were handed out, or that a forward got or returned, do not come again in another order;
- what happens to a copy happens to the original: without random numbers their gradients have equal norms, and with
  them it is not the copies alone that have none.
Rows that are equal are interchangeable as inputs. If their labels differ, the norms tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.clipping.functions import ClippingFunction, ClippingGroup
from dpshard.interception.copies import Copies
from dpshard.interception.doubts import Doubt, Doubts
from dpshard.interception.fingerprints import Kind, Rows, Seen, kind_of, reordered, sampled
from dpshard.interception.run import Run
from dpshard.sampling import MicroBatchPlan

ROUNDING = {True: 1e-4, False: 0.05}
"""Relative to the largest element of a row, by whether it is more than half precision.

Products round equal rows differently, by their place in the batch.
"""


class RowIdentity:
    """Watches the rows of one micro-batch; see [Note: Rows are samples by their number].

    `data` is what was handed out. `mean` is whether losses are means over the rows.
    """

    def __init__(self, plan: MicroBatchPlan, data: Any, doubts: Doubts, *, mean: bool) -> None:
        self.rows, self.samples = len(plan.indices), plan.samples
        self.padded = 0 < self.samples < self.rows
        """Whether there are samples, and copies of the last one behind them."""
        self._doubts, self._mean = doubts, mean
        self._data = data if self.padded and self.samples > 1 else None  # of one sample there is one order
        self._seen = Seen()
        self._waiting: list[tuple[Kind, Tensor]] = []  # of the last forward: looked at when there is another one
        self._forwards = 0
        self._copies = Copies(self.samples) if self.padded else None

    # --- forward ----------------------------------------------------------------------------------------------------

    def enter(self, run: Run) -> None:
        """Look at the inputs of a forward; LogicalBatchError if their rows are not the samples in order."""
        if self.samples == 0:
            return  # nothing of it counts
        with torch.no_grad(), torch._C.DisableTorchFunction():
            leaves = [(x, d) for x, d in zip(run.leaves, run.dims, strict=True) if d is not None and _is_plain(x)]
            if self.padded:
                for x, dim in leaves:
                    if not (x.requires_grad and self._forwards and self._copies is not None and self._copies.random()):
                        self._require_copies(x, dim)
            self._look_for_reordering(leaves)
            self._forwards += 1
        if self._copies is not None and leaves:
            self._copies.begin(leaves[0][0].device)

    def leave(self, output: Any) -> None:
        """Note what a forward has returned: another one may get it."""
        if self.samples < 2:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for x in pytree.tree_leaves(output):
                if _is_plain(x) and x.dim() > 0 and len(x) == self.rows:
                    part = sampled(x, 0)
                    # What is large is not kept alive for this.
                    self._waiting.append((kind_of(x, 0), part if part.numel() == x.numel() else part.clone()))

    def _require_copies(self, x: Tensor, dim: int) -> None:
        filler = x.narrow(dim, self.samples - 1, 1)
        copies = x.narrow(dim, self.samples, self.rows - self.samples)
        if x.device.type == "cpu" and torch.equal(copies, filler.expand_as(copies)):
            return
        differs = copies != filler
        if x.is_floating_point() or x.is_complex():
            nan = (copies != copies) & (filler != filler)  # NaN is a copy of NaN
            rounding = ROUNDING[x.itemsize > 2] * filler.abs().nan_to_num(0, 0, 0).amax()
            differs &= ~nan & ~((copies - filler).abs() <= rounding)
        self._doubts.note(Doubt.FILLER, differs.any())

    def _look_for_reordering(self, leaves: list[tuple[Tensor, int]]) -> None:
        if self._data is not None:
            seen = Seen()
            for x in tensors_within(self._data):
                if _is_plain(x) and x.dim() > 0 and len(x) == self.rows:
                    seen.add(kind_of(x, 0), Rows.of(sampled(x, 0)))
            self._note_reordering(Doubt.SHUFFLED, leaves, seen)
            self._data = None
        if self._forwards:
            for kind, x in self._waiting:
                self._seen.add(kind, Rows.of(x))
            self._waiting.clear()
            self._note_reordering(Doubt.REORDERED, leaves, self._seen)
        self._waiting += [(kind_of(x, dim), sampled(x, dim)) for x, dim in leaves]

    def _note_reordering(self, doubt: Doubt, leaves: list[tuple[Tensor, int]], seen: Seen) -> None:
        flag = reordered([(kind_of(x, dim), Rows.of(sampled(x, dim))) for x, dim in leaves], seen)
        if flag is not None:
            self._doubts.note(doubt, flag)

    # --- backward ---------------------------------------------------------------------------------------------------

    def observe(self, group: ClippingGroup, norm_B: Tensor, function: ClippingFunction) -> None:
        """Take the norms of a group."""
        if self._copies is not None:
            self._copies.observe(group, norm_B, function)

    def end(self) -> None:
        """All backward passes are through: note what the norms tell."""
        norms = None if self._copies is None else self._copies.norms
        if norms is not None:
            self._doubts.note(Doubt.MASKED, norms.are_masked() & self._mean, wait=True)
            self._doubts.note(Doubt.UNLIKE, norms.are_unlike(zero_allowed=not self._mean), wait=True)


def _is_plain(x: Any) -> bool:
    """Whether `x` is a tensor whose rows lie in memory, not in parts or lists of its own."""
    return (
        isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not hasattr(x, "__tensor_flatten__")
    )


def tensors_within(data: Any) -> Iterator[Tensor]:
    """The tensors of a batch: in tuples, lists, mappings (also those of libraries) and dataclasses."""
    if isinstance(data, Tensor):
        yield data.detach()
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_within(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_within(value)
    elif is_dataclass(data):
        for field in fields(data):
            yield from tensors_within(getattr(data, field.name))
