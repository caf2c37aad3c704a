"""Tensor and context parallelism together: a model in parts over some ranks, each sample in parts over others.

The ranks of one model are a grid: C groups of T. A rank's record is a term of a part of the sample's gradient. Terms
over T, of normalisation, are added first, then those over C by a reduce-scatter. Squares of slices add up over C, those
of parts over T; the first rank counts what all T hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpshard.backends.model_parts import SUM, DeclaredParts, ModelParts
from dpshard.errors import ConfigurationError


def placed_parts(
    mesh: DeviceMesh,
    device: torch.device,
    cut: Mapping[str, int],
    parameters: Mapping[str, Tensor],
    declared: DeclaredParts | None,
) -> ModelParts:
    """Return the parts of a model of DTensors; raise ConfigurationError if the user declares other kinds than terms."""
    if declared is None:
        return ModelParts(mesh.get_group(), device, cut, mesh=mesh)
    if wrong := [kind for kind in declared[1].values() if kind != SUM]:
        raise ConfigurationError(
            f"model_parallel_parts gives {wrong[0]!r} for a model that parallelize_module has divided, whose DTensors "
            f"show their parts by themselves. Declare only context parallelism beside them: model_parallel_group with "
            f"the ranks that have parts of one sequence, and model_parallel_parts={{'*': 'sum'}}."
        )
    return PartsOfTerms(mesh, device, cut, ModelParts.declared(declared, parameters, device))


def placed_as(whole: DTensor, part: Tensor) -> DTensor:
    """Return a DTensor placed as `whole`, whose part on this rank is `part`."""
    placed = whole.device_mesh, whole.placements
    return DTensor.from_local(part, *placed, run_check=False, shape=whole.shape, stride=whole.stride())


class PartsOfTerms(ModelParts):
    """The ranks of `mesh` hold parts of a model, those of `terms` hold parts of samples."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, cut: Mapping[str, int], terms: ModelParts) -> None:
        super().__init__(mesh.get_group(), device, cut, mesh=mesh)
        self._terms = terms

    @property
    def terms(self) -> ModelParts:
        """The ranks that each hold a term of a sum."""
        return self._terms

    @property
    def axes(self) -> Sequence[ModelParts]:
        """Dimensions of the grid of these ranks, outermost first."""
        return self._terms, self

    @property
    def in_terms(self) -> bool:
        """True: ranks hold parts of samples."""
        return True

    @property
    def facts(self) -> str:
        """Declarations that ranks must share."""
        return super().facts + self._terms.facts

    def agreed(self, numbers: Sequence[int]) -> list[int]:
        """Return the first rank's numbers."""
        return self._terms.agreed(super().agreed(numbers))

    def is_termwise(self, name: str) -> bool:
        """Return True if the parameter's records are terms."""
        return self._terms.is_termwise(name)

    def norm_sq(self, cut_B: Tensor, whole_B: Tensor) -> Tensor:
        """Squared norms [B], bitwise equal on all ranks."""
        return self._terms.over_ranks(super().norm_sq(cut_B, whole_B))

    def norm_sq_of_sums(self, cut_X: Tensor, whole_X: Tensor) -> Tensor:
        """Squared norms [X] of sums over terms."""
        return super().norm_sq(cut_X, whole_X)

    def sliced(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, n] of sums of terms."""
        return self._terms.sliced(name, terms_B)

    def whole_sum(self, name: str, total: Tensor | None, parameter: Any) -> Tensor | None:
        """Return a whole sum, perhaps from slices; all ranks call it."""
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return self._terms.whole_sum(name, total, own)

    def over_shards(self, parts: Tensor, same: Tensor) -> Tensor:
        """Sum a squared norm over all shards."""
        total = super().over_shards(parts, same)
        return self._terms.over_ranks(total) if self._terms.spread else total
