"""Layouts: for each kind of call, where its tensors carry the samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpshard.errors import BatchLayoutError
from dpshard.rules.call import BatchAxis, Source
from dpshard.rules.torch_functions import Function, function_name

PASS_THROUGH = frozenset(
    {"data", "grad", "detach", "detach_", "requires_grad", "requires_grad_", "register_hook", "backward"}
)
"""Functions and properties of a parameter that carry no gradient of it."""

CallKey = tuple[Any, ...]
"""Name of the function, and per tensor argument the form of the source that it is, or its rank.

Only strings and numbers: dynamo traces the look-up, and cannot hash every function within a tuple.
"""


def call_key(func: Function, tensors: list[Tensor], sources: dict[Tensor, Source]) -> CallKey:
    """Return the key of a call, which is the same for every batch size and length of the inputs: see CallKey."""
    return (function_name(func), *[sources[x].form if x in sources else x.dim() for x in tensors])


@dataclass(slots=True)
class CallLayout:
    """Where the tensors of one kind of call carry the samples."""

    inputs: list[BatchAxis | None]
    """One entry per tensor argument, in order."""
    output: BatchAxis | None
    """For the (first) output."""
    lost: bool = False
    """Whether an argument has rows whose samples are unknown."""

    derives: bool = field(init=False, compare=False)
    """Whether the call met no sample: its output is derived from parameters alone."""
    routed: bool = field(init=False, compare=False)
    """Whether an argument has routed rows."""
    data_dependent: bool = field(init=False, compare=False)
    """Whether the data has picked rows of an argument."""

    def __post_init__(self) -> None:
        # Every call of a forward asks.
        self.derives = self.output is None and not any(self.inputs) and not self.lost
        self.routed = any(axis is not None and axis.routed for axis in self.inputs)
        self.data_dependent = self.routed or self.lost

    def in_order(self) -> CallLayout:
        """Return the layout for rows that lie as if they had never been routed."""
        inputs = [axis and BatchAxis(axis.dim, axis.adjacent) for axis in self.inputs]
        return CallLayout(inputs, self.output and BatchAxis(self.output.dim, self.output.adjacent), self.lost)


Layout = dict[CallKey, CallLayout]


def rows_key(x: Tensor, dim: int) -> CallKey:
    """Return the key under which a layout holds whether `dim` of tensors like `x` carries the samples, for routes."""
    features = x.shape[-1] if x.dim() > dim + 1 and x.is_floating_point() else 0  # of ids it would be their length
    return ("rows", dim, x.dim(), features)


def merge(into: Layout, found: Layout) -> None:
    """Add a layout to another one; BatchLayoutError where a kind of call has samples along different dimensions."""
    for key, layout in found.items():
        known = into.setdefault(key, layout)
        if known != layout and key[0] == "rows":
            known.inputs[0] = None  # of two kinds of tensors with this shape: no evidence for either
        elif known != layout:
            raise BatchLayoutError(
                f"{describe(key)} is called with the samples of the micro-batch along different dimensions; use a "
                f"module of its own for each of the two."
            )


def describe(key: CallKey) -> str:
    """Return the name of a call in errors."""
    labels = [x for x in key[1:] if isinstance(x, str)]
    return f"{key[0]} with {', '.join(labels)}"
