"""Layouts: the batch dimension of each argument and output, by kind of call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dpshard.errors import BatchLayoutError
from dpshard.rules.call import BatchAxis, Source
from dpshard.rules.torch_functions import Function, function_name

PASS_THROUGH = frozenset(
    {"data", "grad", "detach", "detach_", "requires_grad", "requires_grad_", "register_hook", "backward"}
)
"""Functions that carry no gradient to a parameter."""

CallKey = tuple[Any, ...]
"""Function name; for each tensor the form of its source, or its rank. Dynamo cannot hash a tuple with functions."""


def call_key(func: Function, tensors: list[Tensor], sources: dict[Tensor, Source]) -> CallKey:
    """Return the CallKey of a call."""
    return (function_name(func), *[sources[x].form if x in sources else x.dim() for x in tensors])


@dataclass(slots=True)
class CallLayout:
    """Batch axes of one kind of call."""

    inputs: list[BatchAxis | None]
    output: BatchAxis | None
    """Axis of the first output."""
    lost: bool = False
    """True if it is unknown which samples the rows of an argument belong to."""

    derives: bool = field(init=False, compare=False)
    """True if no argument carries samples."""
    routed: bool = field(init=False, compare=False)
    data_dependent: bool = field(init=False, compare=False)
    """True if the data picks rows of an argument."""
    described: str = field(init=False, compare=False)
    """Dimension and order of rows of each axis, as text."""

    def __post_init__(self) -> None:
        self.derives = self.output is None and not any(self.inputs) and not self.lost
        self.routed = any(axis is not None and axis.routed for axis in self.inputs)
        self.data_dependent = self.routed or self.lost
        self.described = " ".join("" if axis is None else f"{axis.dim}/{axis.adjacent}" for axis in self.axes)

    def in_order(self) -> CallLayout:
        """Return the layout for rows that are back in sample order."""
        inputs = [axis and replace(axis, routed=False) for axis in self.inputs]
        return CallLayout(inputs, self.output and replace(self.output, routed=False), self.lost)

    @property
    def axes(self) -> list[BatchAxis | None]:
        """Axes of the inputs, and of the output."""
        return [*self.inputs, self.output]

    def with_axes(self, axes: list[BatchAxis | None]) -> CallLayout:
        """Return the layout with other axes."""
        *inputs, output = axes
        return CallLayout(inputs, output, self.lost)

    def joined(self, other: CallLayout) -> CallLayout | None:
        """Return the layout of calls of both kinds; None if they contradict each other."""
        pairs = [*zip(self.axes, other.axes, strict=False)]
        same = len(self.inputs) == len(other.inputs) and self.lost == other.lost
        if not same or not all(_agree(a, b) for a, b in pairs):
            return None
        # With one row per sample, every order is the same.
        return self.with_axes([a if a is None or b is None or not a.most else _of_more(a, b) for a, b in pairs])


def _agree(a: BatchAxis | None, b: BatchAxis | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dim == b.dim and a.routed == b.routed and (_may_be(a, b) or _may_be(b, a))


def _may_be(few: BatchAxis, more: BatchAxis) -> bool:
    """Return True if `few` would have the row order of `more` with as many rows per sample."""
    return few.most == 1 or few.adjacent == more.adjacent or (few.adjacent == 0 and few.most == more.adjacent)


def _of_more(a: BatchAxis, b: BatchAxis) -> BatchAxis:
    """Return the axis whose probe had more rows per sample."""
    return a if not b.most or a.most >= b.most else b


Layout = dict[CallKey, CallLayout]


def rows_key(x: Tensor, dim: int) -> CallKey:
    """Return the key under which a layout holds whether `dim` of tensors like `x` carries the samples."""
    features = x.shape[-1] if x.dim() > dim + 1 and x.is_floating_point() else 0  # ids end in a length
    return ("rows", dim, x.dim(), features)


def merge(into: Layout, found: Layout) -> None:
    """Add `found` to `into`; BatchLayoutError if a kind of call has samples along different dimensions."""
    for key, layout in found.items():
        known = into.setdefault(key, layout)
        if known != layout and key[0] == "rows":
            known.inputs[0] = None  # two kinds of tensors share this shape
        elif known != layout and (joined := known.joined(layout)) is not None:
            into[key] = joined
        elif known != layout:
            raise BatchLayoutError(
                f"{describe(key)} is called with the samples of the micro-batch along different dimensions; call two "
                f"modules, one for each dimension."
            )


def describe(key: CallKey) -> str:
    """Return the name of a call for errors."""
    labels = [x for x in key[1:] if isinstance(x, str)]
    return f"{key[0]} with {', '.join(labels)}"
