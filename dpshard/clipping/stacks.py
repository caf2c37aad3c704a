"""Small uses of parameters that are recorded together when their anchor closes.

[Note: Uses with equal recipes] The calls (on GPUs: launches) for a small use cost more than its arithmetic. But a model
is made of equal blocks. So the tensors of a small use wait until its anchor closes. All uses with equal recipes and
sizes become one use of the samples of all: one record to make, to measure and to sum. Other uses are recorded as they
arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.uses import Use
from dpshard.config import Execution
from dpshard.records import OuterProduct, OwnMemory, PerSampleGrad, Stacked, small_bytes
from dpshard.rules.call import Recipe, Source

FEWEST = 4
"""Uses that are worth a stack; the records of fewer join others in a Bundle."""

_TOGETHER = 2**5
"""Bytes that wait for uses with one recipe, over those of the largest small use; bounds the memory of their copies."""


@dataclass(slots=True)
class Alike:
    """Uses with equal recipes, and their tensors."""

    recipe: Recipe
    uses: list[Use]
    tensors: list[Sequence[Tensor]]
    """Of one use each, or joined along the samples."""
    nbytes: int = 0

    def stacks(self, group_of: Mapping[str, ClippingGroup]) -> list[Stack]:
        """Make their records, those of the first source first."""
        recipe, n = self.recipe, len(self.uses)
        joined = replace(recipe, batch_size=n * recipe.batch_size)
        if len(self.tensors) == 1:
            tensors = self.tensors[0]
        else:
            tensors = [torch.cat(parts, recipe.axis.dim) for parts in zip(*self.tensors, strict=True)]
        found = []
        for i, record in enumerate(joined(*tensors)):
            assert isinstance(record, PerSampleGrad | OuterProduct)
            names = [use.sources[i].label for use in self.uses]
            found.append(Stack(names, Stacked(record, n), [group_of[name].index for name in names]))
        return found


@dataclass(slots=True)
class Stack:
    """The records of equal uses of as many parameters."""

    names: list[str]
    stacked: Stacked
    groups: list[int]
    """Clipping group of each parameter."""

    def measured(self, execution: Execution) -> Tensor:
        """Squared norms [n, B]."""
        norm_sq_nB, self.stacked = self.stacked.measured(execution.norm, keep=execution.keep_per_sample)
        return norm_sq_nB

    def copy_records(self, memory: OwnMemory) -> None:
        """Keep the records in memory of their own."""
        self.stacked = replace(self.stacked, record=memory.of(self.stacked.record))

    def clipped_sums(self, sum_weight_nB: Tensor, nonfinite_nB: Tensor | None) -> dict[str, Tensor]:
        """Clipped sums by name."""
        finite = self.stacked if nonfinite_nB is None else self.stacked.without(nonfinite_nB)
        return dict(zip(self.names, finite.clipped_sums(sum_weight_nB), strict=True))


class Stacks:
    """The uses that wait for one anchor."""

    def __init__(self, group_of: Mapping[str, ClippingGroup]) -> None:
        self._group_of = group_of
        self._waiting: dict[Any, Alike] = {}
        self.made: list[Stack] = []
        """Records of uses that could not wait, to bound the memory of their tensors."""

    def add(self, uses: Sequence[Use], recipe: Recipe, tensors: Sequence[Tensor]) -> None:
        """Take uses with their recipe, and their tensors, joined along the samples."""
        n = len(uses)
        key = (recipe, *[(x.shape if n == 1 else _of_one(x, recipe.axis.dim, n), x.dtype, x.device) for x in tensors])
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = Alike(recipe, [], [])
        waiting.uses += uses
        waiting.tensors.append(tensors)
        waiting.nbytes += sum(x.nbytes for x in tensors)
        if waiting.nbytes >= _TOGETHER * small_bytes(tensors[0].device):
            self.made += self._waiting.pop(key).stacks(self._group_of)

    def alone(self) -> Iterator[tuple[Use, Sequence[Tensor]]]:
        """Make the records of all uses but of few with one recipe; yield these with their tensors."""
        for waiting in self._waiting.values():
            if len(waiting.uses) >= FEWEST or len(waiting.tensors) < len(waiting.uses):
                self.made += waiting.stacks(self._group_of)
            else:
                yield from zip(waiting.uses, waiting.tensors, strict=True)


def _of_one(x: Tensor, dim: int, uses: int) -> torch.Size:
    shape = list(x.shape)
    shape[dim] //= uses
    return torch.Size(shape)


def recipe_to_join(use: Use, tensors: Sequence[Tensor], roots: Mapping[str, Source], uses: int = 1) -> Recipe | None:
    """Return the recipe of a use that can be recorded together with others, else None.

    `tensors`: those that arrive, or their templates, joined for so many `uses`. `roots`: the parameters as sources.
    """
    recipe = use.build
    if not isinstance(recipe, Recipe) or recipe.axis.adjacent or recipe.axis.routed:
        return None
    nbytes = 0
    for x in tensors:
        if type(x) is not Tensor or x.is_complex():
            return None
        nbytes += x.nbytes // uses
    for source in use.sources:
        if roots.get(source.label) is not source:
            return None  # a tensor derived from parameters
        nbytes += 4 * math.prod(source.shape)
    return recipe if nbytes <= small_bytes(tensors[0].device) else None
