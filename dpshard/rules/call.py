"""The interface of rules: a call of a torch function, and the methods that record the use of a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dpshard.errors import BatchLayoutError
from dpshard.records import Record


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The dimension in which a tensor carries the samples."""

    dim: int
    adjacent: int = 0
    """Number of adjacent rows of a sample among B * k. 0: all k rows ([B, k]); 1: [k, B]; K: [k / K, B, K]."""
    routed: bool = False
    """True if the data decides the order of rows; then each row counts as a sample."""
    most: int = 0
    """The largest k in probes, if values of so few rows do not show the order; otherwise 0."""

    def require_order(self, k: int) -> None:
        """Raise BatchLayoutError unless the order of k rows of a sample is known."""
        if 0 < self.most < k:
            raise BatchLayoutError(
                f"{k} rows of each sample meet a parameter at once (flattened, or pieces that were joined). When their "
                f"order was probed, there were {self.most}, which lie alike side by side ([B, k]) and one batch apart "
                f"([k, B]). Keep the samples in a dimension of their own; let forward get what decides the number of "
                f"rows as an argument; or call engine.verify(...) before training, on samples with several."
            )

    def split(self, x: Tensor, batch_size: int) -> Tensor:
        """Return `x` as [B, ...]; the k rows of a sample become a dimension in place of the flattened one."""
        size = x.shape[self.dim]
        if size == batch_size:
            return x.movedim(self.dim, 0)
        self.require_order(size // batch_size)
        if not self.adjacent:
            return x.unflatten(self.dim, (batch_size, size // batch_size)).movedim(self.dim, 0)
        apart = size // batch_size // self.adjacent
        x = x.unflatten(self.dim, (apart, batch_size, self.adjacent)).movedim(self.dim + 1, 0)
        return x.flatten(self.dim + 1, self.dim + 2)

    def merge(self, x: Tensor, k: int) -> Tensor:
        """Return `x` as before `split`, for k rows per sample."""
        if k == 1:
            return x.movedim(0, self.dim)
        self.require_order(k)
        if not self.adjacent:
            return x.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        x = x.unflatten(self.dim + 1, (k // self.adjacent, self.adjacent))
        return x.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


Recompute = Callable[[dict[str, Tensor]], Tensor]
"""Function that computes a derived tensor from trainable parameters by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A trainable parameter, or a tensor derived from trainable parameters only (`w.t()`, `1 + w`)."""

    label: str
    """Parameter name, or the derivation: "__getitem__(positions, slice(None, 6, None))[0]"."""
    form: str
    """`label` without lengths and constants."""
    roots: tuple[str, ...]
    """Names of its parameters."""
    shape: tuple[int, ...]
    recompute: Recompute
    isometric: bool
    """True if it only rearranges or selects elements of its one root, which preserves norms."""
    exact: bool
    """True if equal labels mean equal functions of the parameters."""
    transpose_of: Source | None = None
    """The source whose transpose this one is; records go there."""
    slice_of: tuple[Source, int] | None = None
    """The weight of all experts, and this expert's index along dimension 0; else None."""


@dataclass(frozen=True, slots=True)
class RecordMaker(ABC):
    """Makes the records of one use. Uses with equal makers may be recorded together."""

    axis: BatchAxis
    batch_size: int

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> Sequence[Record]:
        """Return a record for each source, from the kept tensors and the output gradient (last)."""


Build = RecordMaker | Callable[..., Sequence[tuple[Source, Record]]]
"""Function from the kept tensors and the output gradient (last) to the records."""


def records_of(sources: Sequence[Source], build: Build, tensors: Sequence[Tensor]) -> Sequence[tuple[Source, Record]]:
    """Return the records of a use, each with its source."""
    return [*zip(sources, build(*tensors), strict=True)] if isinstance(build, RecordMaker) else build(*tensors)


Hold = Callable[[Tensor], Tensor]
"""Prepares a tensor for a function and its later tap; see Call.hold."""

Output = tuple[Tensor, tuple[Tensor, ...]]
"""The output, and the tensors to keep for backward."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A use that equal calls repeat; it holds no tensor of one call."""

    sources: tuple[Source, ...]
    maker: RecordMaker
    run: Callable[[Hold, Tensor, Tensor | None, Tensor | None], Output]
    """Function of input, weight and bias, detached from their sources."""
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function from output gradient and weight to the input gradient; None unless weight and bias are sources."""


class Call(Protocol):
    """A call of a torch function with trainable parameters and samples."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    rows_per_unit: int
    output_axis: BatchAxis | None

    def source(self, x: Any) -> Source | None:
        """Return `x` as a source; None for data, constants and frozen parameters."""
        ...

    def plain(self, x: Any) -> Any:
        """Return `x`, detached if it is a source."""
        ...

    def axis(self, x: Tensor) -> BatchAxis | None:
        """Return the batch axis of `x`, or None."""
        ...

    def hold(self, x: Tensor) -> Tensor:
        """Return `x` in a form for both a function and its later tap; pass the result to both."""
        ...

    def tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Sequence[Source], build: Build) -> Tensor:
        """Return `output`; `build` makes records of its gradient and the kept tensors."""
        ...

    def run(self, planned: Planned, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run and tap the call as planned; equal calls repeat the plan."""
        ...

    def per_sample(self, x: Tensor) -> Tensor:
        """Return source `x`, one copy per sample, [B, *shape] (stride 0), whose gradient is the record."""
        ...

    def refuse(self, reason: str, *, advise: bool = True) -> Exception:
        """Return an error with parameter, module and function."""
        ...


def batch_axis(call: Call, x: Tensor) -> BatchAxis:
    """Return the batch axis of `x`, or raise BatchLayoutError."""
    axis = call.axis(x)
    if axis is None:
        raise BatchLayoutError(str(call.refuse("its data input carries no samples of the micro-batch")))
    return axis


def spread(call: Call, x: Tensor, from_right: int, size: int, axis: BatchAxis) -> Tensor:
    """Return source `x` with one copy per sample, for the `size` = B * k rows of `axis` at dimension -from_right."""
    source = call.source(x)
    assert source is not None
    B = call.batch_size
    shape = (1,) * (from_right - len(source.shape)) + source.shape
    dim = len(shape) - from_right
    if shape[dim] != 1:
        raise call.refuse(f"its dimension {dim} of size {shape[dim]} lies along the samples of the micro-batch")
    copies = call.per_sample(x).reshape(B, *shape)
    # A dimension of size 1 at `dim` expands to the k rows of a sample.
    k = size // B
    of_copies = BatchAxis(dim, axis.adjacent, axis.routed, axis.most)  # dynamo cannot trace `replace`
    return of_copies.merge(
        copies.squeeze(dim + 1) if k == 1 else copies.expand(B, *shape[:dim], k, *shape[dim + 1 :]), k
    )
