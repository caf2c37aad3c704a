"""One outermost call of a module: which of its inputs carry samples, and how to repeat it on some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.errors import BatchLayoutError
from dpshard.interception.vmapped import transforms_are_active
from dpshard.rules.torch_functions import differentiable
from dpshard.sampling import MicroBatchPlan

READINGS = 16
"""Largest number of ways to read the inputs of a model that are tried."""


@dataclass(frozen=True, slots=True)
class Run:
    """One outermost call of a module, which can be repeated on chosen samples."""

    module: nn.Module
    original: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    batch_size: int
    dims: tuple[int | None, ...]
    """Per leaf: the dimension of the samples, or None."""
    rows: int
    """The first rows, which are samples and not padding; at least 1."""

    def on(self, samples: list[int]) -> Any:
        """Return the output for `samples` (indices into the batch) alone."""
        args, kwargs = pytree.tree_unflatten([self._pick(i, samples) for i in range(len(self.leaves))], self.tree)
        return self.original(*args, **kwargs)

    def first(self, n: int, rows: int) -> Any:
        """Return the output for the first n of `rows` samples, repeated if there are fewer."""
        return self.on([i % rows for i in range(n)])

    def other_readings(self) -> Iterator[Run]:
        """Yield the call with some inputs as constants, though their size is the batch's: a mask [T, T] of T = B."""
        square = (self.batch_size, self.batch_size)
        carrying = [i for i, d in enumerate(self.dims) if d == 0]
        doubtful = [i for i in carrying if self.leaves[i].dim() == 1 or self.leaves[i].shape[:2] == square]
        doubtful.sort(key=lambda i: (self.leaves[i].is_floating_point(), self.leaves[i].dim()))  # the likeliest first
        subsets = (itertools.combinations(doubtful, n) for n in range(1, len(carrying)))
        for constant in itertools.islice(itertools.chain.from_iterable(subsets), READINGS):
            yield replace(self, dims=tuple(None if i in constant else d for i, d in enumerate(self.dims)))

    def beginning_with(self, samples: list[int]) -> Run:
        """Return the call with these samples before the others."""
        order = [*samples, *(i for i in range(self.batch_size) if i not in samples)]
        return replace(self, leaves=tuple(self._pick(i, order) for i in range(len(self.leaves)))) if samples else self

    def _pick(self, i: int, samples: list[int]) -> Any:
        leaf, dim = self.leaves[i], self.dims[i]
        if dim is None:
            return leaf
        with torch._C.DisableTorchFunction():
            picked = leaf.detach().index_select(dim, torch.tensor(samples, device=leaf.device))
        return picked.clone()  # modes must see a new tensor, not the indexing


def plan_run(
    module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any, plan: MicroBatchPlan | None
) -> Run:
    """Find the samples among the inputs: dimension 0 of at least one; of others the only dimension that is B long."""
    if transforms_are_active():
        raise BatchLayoutError(
            f"{type(module).__name__} was called within torch.vmap or another transform of torch.func, so its samples "
            f"are hidden. Call it on the whole micro-batch; within its forward torch.vmap is followed."
        )
    leaves, tree = pytree.tree_flatten((args, kwargs))
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    if not sizes:
        raise BatchLayoutError(
            f"{type(module).__name__} was called without a tensor argument, so its samples cannot be counted. "
            f"Pass tensors, or tuples, lists and dicts of tensors (model(**batch) rather than model(batch)). "
            f"engine.batches(...) yields logical batches: `for x, y in logical_batch:` loops over micro-batches."
        )
    B = len(plan.indices) if plan is not None else sizes[0]
    if plan is None and len(set(sizes) - {1}) > 1:
        raise BatchLayoutError(
            f"The inputs of {type(module).__name__} have different first dimensions {sizes}, so its samples cannot be "
            f"counted. Put the samples first in every input, pass what has none as a buffer or keyword of the module, "
            f"or iterate over engine.batches(...), which knows their number."
        )
    if B == 0:
        raise BatchLayoutError(
            f"{type(module).__name__} was called with a batch of no rows. Skip it, or let engine.batches(...) pad it."
        )

    def dim(x: Any) -> int | None:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return None
        fitting = [d for d in range(x.dim()) if x.shape[d] == B]
        return 0 if 0 in fitting else fitting[0] if len(fitting) == 1 else None

    dims = tuple(dim(x) for x in leaves)
    if 0 not in dims:
        shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
        raise BatchLayoutError(
            f"The micro-batch has {B} rows, padding included, but no input of {type(module).__name__} has so many "
            f"rows along dimension 0 (shapes {shapes}). Pass all rows of the micro-batch to the model, and "
            f"fetch the next one after its backward: num_workers= of engine.batches reads ahead."
        )
    return Run(module, original, tuple(leaves), tree, B, dims, max(1, B if plan is None else plan.samples_everywhere))


def refuse_two_batch_dimensions(run: Run) -> None:
    """Raise BatchLayoutError if a hidden tensor may be [B, T, ...] as well as [T, B, ...]: for calls of a part.

    A whole model gets the samples first; a part gets what other parts have made.
    """
    for x in run.leaves:
        if isinstance(x, Tensor) and differentiable(x) and x.dim() > 2 and x.shape[0] == x.shape[1] == run.batch_size:
            raise BatchLayoutError(
                f"{type(run.module).__name__}, a part of the model, was called directly with an input of shape "
                f"{tuple(x.shape)}, of which dimension 0 or 1 may hold the {run.batch_size} samples; "
                f"choose a micro-batch size that is no other length, or call the model as a whole."
            )
