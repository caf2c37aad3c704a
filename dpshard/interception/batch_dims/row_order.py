"""The order of rows flattened into the batch: [B, k], [k, B], or [k / K, B, K] of units.

Under the right order, the rows of samples in both runs are equal. An order is the number of adjacent rows of a sample,
as in BatchAxis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpshard.errors import BatchLayoutError
from dpshard.interception.batch_dims.axes import CallKey, Layout, describe
from dpshard.records import as_real
from dpshard.rules.call import BatchAxis

ROWS: CallKey = ("an index along dimension 0",)
"""Key of a pick of rows, which begins a route; the order there must be [B, k]."""

_SAME = 0.1
"""Largest relative difference between rows that count as equal; allows for half precision."""


@dataclass(frozen=True, slots=True)
class UndecidedDim:
    """A flattened batch dimension; only values show its order."""

    key: CallKey
    place: int
    """Index among the inputs, followed by the output."""
    dim: int
    value: Tensor
    """The tensor in the second run."""
    seen_at: int
    """Index of the tensor among the values of the first run's call."""
    rows: CallKey | None = None
    """Key of the answer if a route may begin here."""
    silent: int | None = 0
    """The value whose elements get no gradient: 0 in a factor, padding_idx in ids."""

    def shows_in_gradients(self) -> bool:
        """Return True if verification, which compares gradients, would reveal a wrong order."""
        if isinstance(self.value, FakeTensor):
            return False
        return self.silent is None or bool((self.value != self.silent).any())


def settle(
    layout: Layout,
    doubts: dict[int, list[UndecidedDim]],
    values: dict[int, list[Tensor]],
    sizes: tuple[int, int],
    rows_per_unit: int = 1,
    *,
    verified: bool = True,
) -> None:
    """Write the row order of flattened dimensions into `layout`.

    `doubts` and `values` (the first run's tensors) are keyed by the position of the call. `verified`: gradients are
    compared later, so an undecided order may be assumed to be that of the inputs.
    """
    settled: dict[tuple[CallKey, int], int] = {}
    undecided: list[UndecidedDim] = []
    for position, here in doubts.items():
        for doubt in here:
            order = _adjacent_rows(doubt, values[position][doubt.seen_at], sizes, rows_per_unit, verified=verified)
            if order is None:
                undecided.append(doubt)
            elif settled.setdefault((doubt.key, doubt.place), order) != order:
                raise BatchLayoutError(
                    f"{describe(doubt.key)} is called with the rows of the samples in different orders; call two "
                    f"modules, one for each order."
                )
    as_given = set(settled.values()) <= {0, rows_per_unit}  # wherever values decide, a unit's rows are adjacent
    for doubt in undecided:
        if doubt.key == ROWS and not doubt.value.is_floating_point() and not any(key == ROWS for key, _ in settled):
            layout.pop(doubt.rows or ROWS, None)  # equal ids show no order: no route, unless a parameter needs one
            continue
        like_inputs = doubt.value.shape[doubt.dim] == sizes[1] * rows_per_unit > sizes[1]
        # Verification finds a wrong order of equal rows (positions), unless no row has a gradient yet.
        if verified and like_inputs and as_given and doubt.shows_in_gradients():
            settled.setdefault((doubt.key, doubt.place), 0)
        else:
            settled[doubt.key, doubt.place] = _as_beside(doubt, settled, layout, sizes[1])
    for (key, place), order in settled.items():
        if order:
            found = layout[key]
            axis = found.inputs[place] if place < len(found.inputs) else found.output
            assert axis is not None
            axis = replace(axis, adjacent=order)
            if place < len(found.inputs):
                found.inputs[place] = axis
            else:
                found.output = axis


def _adjacent_rows(
    doubt: UndecidedDim, old: Tensor, sizes: tuple[int, int], rows_per_unit: int, *, verified: bool
) -> int | None:
    """Return how many rows of a sample are adjacent, 0 for all; None if values do not decide it."""
    (first, second), old, new = sizes, as_real(old), as_real(doubt.value)
    k = old.shape[doubt.dim] // first
    error, scale = {}, float(old.double().abs().nan_to_num_(0).max())
    orders = [0, 1] if rows_per_unit in (1, k) or k % rows_per_unit else [0, 1, rows_per_unit]
    for order in orders:
        axis = BatchAxis(doubt.dim, order)
        sides = [axis.split(x, size)[:first].double() for x, size in ((old, first), (new, second))]
        error[order] = float((sides[0] - sides[1]).abs().nan_to_num_(0).max())
    best = min(error.values())
    fitting = [order for order, e in error.items() if e <= 2 * best]
    if best > _SAME * scale:
        raise BatchLayoutError(
            f"{describe(doubt.key)} sees a tensor of shape {tuple(new.shape)} for {second} samples. Its "
            f"dimension {doubt.dim} holds the rows of a sample neither side by side ([B, k], flattened) "
            f"nor one batch apart ([k, B]). Put the samples first before you flatten."
        )
    if verified and fitting == [1, rows_per_unit]:
        fitting = [rows_per_unit]  # all units are equal, so their rows lie as those of the inputs
    if len(fitting) > 1:
        return None
    if fitting != [0] and doubt.key == ROWS:
        raise BatchLayoutError(
            f"Rows are picked along dimension 0 of a tensor of shape {tuple(new.shape)}, which holds the "
            f"rows of a sample one batch apart ([k, B]). Put the samples first before you flatten."
        )
    return fitting[0]


def _as_beside(doubt: UndecidedDim, settled: dict[tuple[CallKey, int], int], layout: Layout, second: int) -> int:
    """Return an order for equal rows, from other tensors of the same kind of call."""
    orders = [order for (key, _), order in settled.items() if key == doubt.key]
    if (doubt.key, doubt.place) in settled:
        return settled[doubt.key, doubt.place]
    if isinstance(doubt.value, FakeTensor):
        return max(orders, default=0)  # without values, any order will do
    if not orders and (doubt.key == ROWS or doubt.place < len(layout[doubt.key].inputs)):
        raise BatchLayoutError(
            f"{describe(doubt.key)} sees equal rows in a tensor of shape "
            f"{tuple(doubt.value.shape)} for {second} samples. So dpshard cannot tell whether dimension "
            f"{doubt.dim} holds the rows of a sample side by side ([B, k], flattened) or one batch apart ([k, B]). "
            f"Keep the samples in a dimension of their own, or begin with small random weights rather than zeros. "
            f"With rows_per_unit=, verify=True compares gradients, and data with different rows also help."
        )
    return max(orders, default=0)
