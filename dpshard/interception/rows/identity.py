"""Checks that row i of a micro-batch remains row i between forwards.

All forwards of a micro-batch share a tape, on which row i is sample i, or padding. A loop that sorts, shuffles or
replaces rows breaks this. Rows of a unit must be adjacent, and padding rows equal the last sample in every input,
except for rounding and earlier dropout. docs/architecture.md lists more evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.interception.rows.between_parts import outputs_in_graph, refuse_between
from dpshard.interception.rows.doubts import Doubt, Doubts
from dpshard.interception.rows.fingerprints import Rows, Seen
from dpshard.interception.rows.handed_out import repeats, transposed
from dpshard.interception.rows.padding import Copies
from dpshard.interception.run import Run, by_unit
from dpshard.sampling import MicroBatchPlan

ROUNDING = {True: 1e-4, False: 0.05}
"""Largest rounding relative to the largest element; True: wider than half precision."""


class RowIdentity:
    """Watches the rows of one micro-batch.

    `data`: the batch that `engine.batches` gave out. `mean`: losses are means over rows.
    """

    def __init__(self, plan: MicroBatchPlan, data: Any, doubts: Doubts, *, mean: bool) -> None:
        self.samples, self._rows_per_unit = plan.samples, plan.rows_per_unit
        self.rows = len(plan.indices) * plan.rows_per_unit
        padded = 0 < plan.samples < len(plan.indices)
        self.copies = Copies(self.samples, mean=mean) if padded else None
        self._doubts = doubts
        self._data = data if self.samples > 1 else None  # a single sample has only one order
        self._on_accelerators = padded or not plan.step & (plan.step - 1)
        self._seen = Seen(self._rows_per_unit)
        self._inputs: list[Run] = []  # of the first forward, to compare with a second
        self._outputs: list[Rows] = []
        self._graph: list[Any] = []  # autograd nodes of earlier outputs
        self._forwards = 0

    def enter(self, run: Run) -> None:
        """Check the inputs; LogicalBatchError if their rows are not the samples in order."""
        self._forwards += 1
        if self.samples == 0:
            return
        if self._forwards > 1 and self.samples > 1:
            refuse_between((x for x in run.given if isinstance(x, Tensor)), self._graph, rows=self.rows)
        if self._forwards == 1:
            self._inputs.append(run)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            inputs = _inputs_of(run)
            if self.copies is not None and inputs:
                for rows in inputs:
                    if not (rows.tensor.requires_grad and self._forwards > 1 and self.copies.random()):
                        self._require_copies(rows.tensor, rows.dim)
                self.copies.begin(inputs[0].tensor.device)
            if self._data is not None:
                self._compare_with_data(inputs)
            if self._forwards > 1:
                self._require_order_of_forwards(inputs)

    def read(self, run: Run) -> None:
        """Do nothing."""

    def leave(self, output: Any) -> None:
        """Note the outputs."""
        if self.samples < 2:
            return
        leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
        self._graph += outputs_in_graph(leaves)
        for x in leaves:
            if _is_plain(x) and x.dim() > 0 and len(x) == self.rows:
                self._outputs.append(Rows.of(x.detach(), 0).light())

    def _require_copies(self, x: Tensor, dim: int) -> None:
        x = by_unit(x, dim, self._rows_per_unit)
        filler = x.narrow(dim, self.samples - 1, 1)
        copies = x.narrow(dim, self.samples, x.shape[dim] - self.samples)
        if x.device.type == "cpu" and torch.equal(copies, filler.expand_as(copies)):
            return
        differs = copies != filler
        if x.is_floating_point() or x.is_complex():
            nan = (copies != copies) & (filler != filler)  # NaN equals NaN here
            rounding = ROUNDING[x.itemsize > 2] * filler.abs().nan_to_num(0, 0, 0).amax()
            differs &= ~nan & ~((copies - filler).abs() <= rounding)
        other = differs.any()
        if self._rows_per_unit > 1:
            other = other & _other_rows(filler.movedim(dim, 0), copies.movedim(dim, 0), dim)
        self._doubts.note(Doubt.FILLER, other)

    def _compare_with_data(self, inputs: list[Rows]) -> None:
        handed: list[Rows] = []
        for device in {rows.tensor.device for rows in inputs}:
            if device.type != "cpu" and not self._on_accelerators:
                continue  # a comparison would need a transfer and hashes
            handed += [
                Rows.of(x if x.device == device else x.to(device, non_blocking=True), 0)
                for x in tensors_within(self._data)
                if _is_plain(x) and x.dim() > 0 and len(x) == self.rows
            ]
        for rows in inputs:
            alike = [x for x in handed if x.kind == rows.kind]
            self._note(Doubt.REPEATED, repeats(rows, alike, self.samples * self._rows_per_unit))
            for x in alike:
                self._note(Doubt.TRANSPOSED, transposed(rows, x.tensor))
        if (self.copies is not None or self._rows_per_unit > 1) and self._forwards == 1:
            seen = Seen(self._rows_per_unit)
            for x in handed:
                seen.add(x)
            self._note(Doubt.SHUFFLED if self._rows_per_unit == 1 else Doubt.SCATTERED, seen.reordered(inputs))

    def _require_order_of_forwards(self, inputs: list[Rows]) -> None:
        earlier = [rows for run in self._inputs for rows in _inputs_of(run)] + self._outputs
        for rows in earlier:
            self._seen.add(rows)
        self._inputs.clear()
        self._outputs.clear()
        self._note(Doubt.REORDERED, self._seen.reordered(inputs))
        for rows in inputs:
            self._seen.add(rows)

    def _note(self, doubt: Doubt, flag: Tensor | None) -> None:
        if flag is not None:
            self._doubts.note(doubt, flag)


def _other_rows(filler: Tensor, copies: Tensor, dim: int) -> Tensor:
    """Return True if copies [m, ...] of a unit have other rows than the unit, in any order.

    Rows are dimension 1 + `dim`. Their products with a random vector distinguish them.
    """
    wide = torch.complex128 if filler.is_complex() else torch.float64
    rows = [
        x.movedim(1 + dim, 1).flatten(2).to(wide) if x.dim() > 2 else x[..., None].to(wide) for x in (filler, copies)
    ]
    direction = torch.randn(rows[0].shape[2], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    marks = [(x.nan_to_num(0, 0, 0) @ direction.to(x)).abs().sort(1).values for x in rows]
    size = rows[0].abs().nan_to_num(0, 0, 0).amax() * rows[0].shape[2] ** 0.5
    rounding = ROUNDING[filler.itemsize > 2] if filler.is_floating_point() or filler.is_complex() else 1e-9
    return ((marks[0] - marks[1]).abs() > rounding * size).any()


def _inputs_of(run: Run) -> list[Rows]:
    return [Rows.of(x, d) for x, d in run.carrying() if _is_plain(x)]


def _is_plain(x: Any) -> bool:
    return (
        isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not hasattr(x, "__tensor_flatten__")
    )


def tensors_within(data: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_within(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_within(value)
    elif is_dataclass(data):
        for field in fields(data):
            yield from tensors_within(getattr(data, field.name))
