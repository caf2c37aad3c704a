"""What a rule is given: one torch function call that uses trainable parameters, and two ways to record the use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dpshard.errors import BatchLayoutError
from dpshard.records import Record


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Where a tensor carries the samples of the micro-batch."""

    dim: int
    """The dimension, from 0."""
    adjacent: int = 0
    """When the dimension is B * k long: how many of the k rows of a sample are adjacent. 0: all ([B, k]); 1: none
    ([k, B]); K, where a unit has so many in the inputs of the model: [k / K, B, K]."""
    routed: bool = False
    """Whether the data decides which sample's row is where (experts): every row of the call then counts as a sample."""

    def split(self, x: Tensor, batch_size: int) -> Tensor:
        """`x` with the samples first: [B, ...]; k rows of a sample become a dimension of their own, where they were."""
        size = x.shape[self.dim]
        if size == batch_size:
            return x.movedim(self.dim, 0)
        if not self.adjacent:
            return x.unflatten(self.dim, (batch_size, size // batch_size)).movedim(self.dim, 0)
        apart = size // batch_size // self.adjacent
        x = x.unflatten(self.dim, (apart, batch_size, self.adjacent)).movedim(self.dim + 1, 0)
        return x.flatten(self.dim + 1, self.dim + 2)

    def merge(self, x: Tensor, k: int) -> Tensor:
        """Undo `split`: from samples first to the layout of this axis; k rows a sample (1: no dimension for them)."""
        if k == 1:
            return x.movedim(0, self.dim)
        if not self.adjacent:
            return x.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        x = x.unflatten(self.dim + 1, (k // self.adjacent, self.adjacent))
        return x.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


Replay = Callable[[dict[str, Tensor]], Tensor]
"""A derivation: from the values of the trainable parameters by name to the derived tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A trainable parameter, or a tensor that was derived from trainable parameters alone (`w.t()`, `1 + w`)."""

    label: str
    """Parameter name, or the derivation as text: "__getitem__(positions, slice(None, 6, None))[0]"."""
    form: str
    """The same without the lengths of slices and constants: the place in the model, however long the inputs are."""
    roots: tuple[str, ...]
    """Names of the trainable parameters it comes from."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    replay: Replay
    isometric: bool
    """Whether it only rearranges or selects elements of its one root: then norms are those of the root's gradient."""
    exact: bool
    """Whether two sources of the same label are the same function of the parameters (no constants took part)."""
    transpose_of: Source | None = None
    """The matrix that this matrix is the transpose of: a product with the one is recorded as one with the other."""
    slice_of: tuple[Source, int] | None = None
    """The source that holds this as one element along dimension 0, and which one: an expert's weight."""


Build = Callable[..., Sequence[tuple[Source, Record]]]
"""From the tensors kept in forward and the output gradient (last) to the records of the sources."""


class Call(Protocol):
    """One call of a torch function in which trainable parameters meet the samples of the micro-batch."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    rows_per_unit: int
    output_axis: BatchAxis | None

    def source(self, x: Any) -> Source | None:
        """Return the source that `x` is, or None for data, constants and frozen parameters."""
        ...

    def plain(self, x: Any) -> Any:
        """`x`, cut off from autograd if it is a source."""
        ...

    def axis(self, x: Tensor) -> BatchAxis | None:
        """Where `x` carries the samples, or None if it does not."""
        ...

    def hold(self, x: Tensor) -> Tensor:
        """`x`, for a function whose tap will keep it: hand what is returned to both."""
        ...

    def tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Sequence[Source], build: Build) -> Tensor:
        """`output` unchanged; its gradient, with what was kept, becomes the records that `build` returns."""
        ...

    def per_sample(self, x: Tensor) -> Tensor:
        """Return the values of source `x`, one copy a sample, [B, *shape] (stride 0); its gradient is the record."""
        ...

    def refuse(self, reason: str, *, advise: bool = True) -> Exception:
        """Return the error to raise, with parameter, module, function; `advise` appends general advice to `reason`."""
        ...


def batch_axis(call: Call, x: Tensor) -> BatchAxis:
    """Return the batch axis of `x`; raises BatchLayoutError if it has none."""
    axis = call.axis(x)
    if axis is None:
        raise BatchLayoutError(str(call.refuse("its data input carries no samples of the micro-batch")))
    return axis


def spread(call: Call, x: Tensor, from_right: int, size: int, adjacent: int) -> Tensor:
    """Return the source `x`, one copy a sample, to broadcast with data of `size` = B * k rows at dim -from_right.

    `adjacent`: see BatchAxis.
    """
    source = call.source(x)
    assert source is not None
    B = call.batch_size
    shape = (1,) * (from_right - len(source.shape)) + source.shape
    dim = len(shape) - from_right
    if shape[dim] != 1:
        raise call.refuse(f"its dimension {dim} of size {shape[dim]} lies along the samples of the micro-batch")
    copies = call.per_sample(x).reshape(B, *shape)
    # The size-1 dimension at `dim` becomes the k rows of a sample: autograd sums their gradients.
    k = size // B
    return BatchAxis(dim, adjacent).merge(
        copies.squeeze(dim + 1) if k == 1 else copies.expand(B, *shape[:dim], k, *shape[dim + 1 :]), k
    )
