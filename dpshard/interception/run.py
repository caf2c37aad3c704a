"""One outermost call of a module, to repeat on some of its samples.

A sample is a unit of K = `rows_per_unit` adjacent rows. `Run.leaves` have one dimension for units and one for their
rows; only `Run.on` joins them. See docs/architecture.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.errors import BatchLayoutError
from dpshard.interception.vmapped import transforms_are_active
from dpshard.rules.torch_functions import differentiable
from dpshard.sampling import MicroBatchPlan, PackedTokens

READINGS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One outermost call of a module."""

    module: nn.Module
    original: Callable[..., Any]
    given: tuple[Any, ...]
    """The inputs, unchanged."""
    leaves: tuple[Any, ...]
    """With `rows_per_unit` > 1, samples and their rows have a dimension each."""
    tree: pytree.TreeSpec
    batch_size: int
    dims: tuple[int | None, ...]
    """The dimension of the samples in each leaf, or None."""
    rows: int
    """Number of samples, without padding; at least 1."""
    rows_per_unit: int = 1
    packed: PackedTokens | None = None
    """The units of packed rows, in a PackedRun."""
    grid: Any = None
    """Their TokenGrid."""

    def on(self, samples: list[int]) -> Any:
        """Return the output for `samples` (indices)."""
        picked = [self._joined(self._pick(i, samples), self.dims[i]) for i in range(len(self.leaves))]
        args, kwargs = pytree.tree_unflatten(picked, self.tree)
        return self.original(*args, **kwargs)

    def carrying(self) -> list[tuple[Tensor, int]]:
        """Return the inputs that carry samples, with their dimensions."""
        return [(x, dim) for x, dim in zip(self.given, self.dims, strict=True) if dim is not None]

    def reading(self, dims: tuple[int | None, ...]) -> Run:
        """Return the call with these batch dimensions."""
        leaves = tuple(by_unit(x, dim, self.rows_per_unit) for x, dim in zip(self.given, dims, strict=True))
        return replace(self, dims=dims, leaves=leaves)

    def other_readings(self) -> Iterator[Run]:
        """Yield the call with some inputs read as constants, such as a mask [T, T] with T = B."""
        B = self.batch_size * self.rows_per_unit
        carrying = [i for i, d in enumerate(self.dims) if d == 0]
        doubtful = [i for i in carrying if self.given[i].dim() == 1 or self.given[i].shape[:2] == (B, B)]
        doubtful.sort(key=lambda i: (self.given[i].is_floating_point(), self.given[i].dim()))  # the likeliest first
        subsets = (itertools.combinations(doubtful, n) for n in range(1, len(carrying)))
        for constant in itertools.islice(itertools.chain.from_iterable(subsets), READINGS):
            yield self.reading(tuple(None if i in constant else d for i, d in enumerate(self.dims)))

    def beginning_with(self, samples: list[int]) -> Run:
        """Return the call with these samples first."""
        order = [*samples, *(i for i in range(self.batch_size) if i not in samples)]
        return replace(self, leaves=tuple(self._pick(i, order) for i in range(len(self.leaves)))) if samples else self

    def _pick(self, i: int, samples: list[int]) -> Any:
        leaf, dim = self.leaves[i], self.dims[i]
        if dim is None:
            return leaf
        with torch._C.DisableTorchFunction():
            picked = leaf.detach().index_select(dim, torch.tensor(samples, device=leaf.device))
            if not leaf.is_contiguous():
                return _laid_out_as(leaf, picked)  # forward may depend on it
        return picked.clone()  # modes identify tensors by object, so each run gets new ones

    def _joined(self, x: Any, dim: int | None) -> Any:
        if dim is None or self.rows_per_unit == 1:
            return x
        with torch._C.DisableTorchFunction():
            return x.flatten(dim, dim + 1)


def _laid_out_as(x: Tensor, picked: Tensor) -> Tensor:
    """Return `picked`, non-contiguous, with the dimensions in the same order in memory as those of `x`."""
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    dense = picked.permute(order).contiguous()
    back = [order.index(d) for d in range(x.dim())]
    if not dense.permute(back).is_contiguous():
        return dense.permute(back)
    gapped = dense.new_empty((*dense.shape[:-1], dense.shape[-1] + 1))[..., :-1]
    return gapped.copy_(dense).permute(back)


def by_unit(x: Any, dim: int | None, rows_per_unit: int) -> Any:
    """Return `x` with dimensions of units, at `dim`, and of their rows."""
    if dim is None or rows_per_unit == 1:
        return x
    with torch._C.DisableTorchFunction():
        return x.unflatten(dim, (-1, rows_per_unit))


def plan_run(
    module: nn.Module,
    original: Callable[..., Any],
    args: Any,
    kwargs: Any,
    plan: MicroBatchPlan | None,
    rows_per_unit: int = 1,
) -> Run:
    """Find the inputs that carry samples: along dimension 0 if it has B rows, else along the only such one.

    Raises BatchLayoutError unless one input has the samples in dimension 0.
    """
    if transforms_are_active():
        raise BatchLayoutError(
            f"{type(module).__name__} was called within torch.vmap or another transform of torch.func, so its samples "
            f"are hidden. Call it on the whole micro-batch. Its forward may use torch.vmap."
        )
    leaves, tree = pytree.tree_flatten((args, kwargs))
    B = _row_count(module, leaves, plan, rows_per_unit)

    def dim(x: Any) -> int | None:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return None
        fitting = [d for d in range(x.dim()) if x.shape[d] == B]
        return 0 if 0 in fitting else fitting[0] if len(fitting) == 1 else None

    dims = tuple(dim(x) for x in leaves)
    if 0 not in dims:
        shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
        raise BatchLayoutError(
            f"The micro-batch has {B} rows, padding included, but no input of {type(module).__name__} has {B} rows "
            f"along dimension 0 (shapes {shapes}). Pass all rows of the micro-batch to the model, and fetch the next "
            f"one after its backward: num_workers= of engine.batches reads ahead."
        )
    m = B // rows_per_unit
    rows = max(1, m if plan is None else plan.min_samples_per_rank)
    given = tuple(leaves)
    run = Run(module, original, given, given, tree, m, dims, rows, rows_per_unit)
    return run if rows_per_unit == 1 else run.reading(dims)


def _row_count(module: nn.Module, leaves: Sequence[Any], plan: MicroBatchPlan | None, rows_per_unit: int) -> int:
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    if not sizes:
        raise BatchLayoutError(
            f"{type(module).__name__} was called without a tensor argument, so its samples cannot be counted. "
            f"Pass tensors, or tuples, lists and dicts of tensors (model(**batch) rather than model(batch)). "
            f"engine.batches(...) yields logical batches: `for x, y in logical_batch:` loops over micro-batches."
        )
    B = len(plan.indices) * rows_per_unit if plan is not None else sizes[0]
    if plan is None and len(set(sizes) - {1}) > 1:
        raise BatchLayoutError(
            f"The inputs of {type(module).__name__} have different first dimensions {sizes}, so its samples cannot be "
            f"counted. Put the samples first in every input, and pass tensors without samples as buffers or keywords "
            f"of the module. Or iterate over engine.batches(...), which counts the samples."
        )
    if B == 0:
        raise BatchLayoutError(
            f"{type(module).__name__} was called with an empty batch. An empty logical batch is a step like any "
            f"other: a skipped one shows that no sample was drawn. Feed one row with a loss weight of 0, or let "
            f"engine.batches(...) pad it. Skip a micro-batch only if its step has others."
        )
    if B % rows_per_unit:
        raise BatchLayoutError(
            f"{type(module).__name__} was called with {B} rows, which is not a multiple of "
            f"rows_per_unit={rows_per_unit}. Pass all rows of every unit, side by side; dpshard.UnitDataset fills "
            f"units that have fewer rows."
        )
    return B


def refuse_two_batch_dimensions(run: Run) -> None:
    """Raise BatchLayoutError if a part of the model gets a hidden tensor that may be [B, T, ...] or [T, B, ...]."""
    rows = run.batch_size * run.rows_per_unit
    for x in run.given:
        if isinstance(x, Tensor) and differentiable(x) and x.dim() > 2 and x.shape[0] == x.shape[1] == rows:
            raise BatchLayoutError(
                f"{type(run.module).__name__}, a part of the model, was called directly with an input of shape "
                f"{tuple(x.shape)}: dimension 0 or 1 may hold the {run.batch_size} samples. Choose a micro-batch size "
                f"that no other dimension has, or call the whole model."
            )
