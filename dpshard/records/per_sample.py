"""Records that hold the per-sample gradients themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.records.host import is_at_hand, short_norm_sq
from dpshard.records.numerics import as_real, flat, norms, wide, zero_rows


@dataclass(frozen=True, slots=True)
class PerSampleGrad:
    """Per-sample gradients [B, *shape] of a parameter of shape [*shape]."""

    gradient: Tensor

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], float32 or float64."""
        return _norm_sq(flat(self.gradient)) if self.is_small else norms(self.gradient).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return wide(self.gradient)

    def clipped_sum(self, clip_coef_B: Tensor) -> Tensor:
        """sum_i clip_coef_i * gradient_i, [*shape]."""
        rows, shape = flat(self.gradient), self.gradient.shape[1:]
        total = clip_coef_B.to(rows.dtype) @ rows  # a product that FLOP counters know
        return total if len(shape) == 1 else total.view(shape)

    def real(self) -> PerSampleGrad:
        """See record.py."""
        return PerSampleGrad(as_real(self.gradient))

    def without(self, nonfinite_B: Tensor) -> PerSampleGrad:
        """Return a copy with exact zeros for `nonfinite_B` (bool [B])."""
        return PerSampleGrad(zero_rows(self.gradient, nonfinite_B))

    @property
    def is_small(self) -> bool:
        """True if calls cost more than arithmetic."""
        return self.gradient.shape[1:].numel() <= _SMALL


@dataclass(frozen=True, slots=True)
class FusedGrads:
    """Small per-sample gradients of several parameters, measured and summed together."""

    rows: Tensor
    """[B, elements of all parameters]"""
    shapes: Mapping[str, torch.Size]
    """Shapes of the parameters, by name, in order."""

    @classmethod
    def of(cls, records: Mapping[str, PerSampleGrad]) -> FusedGrads:
        """Join the gradients of parameters, by name."""
        rows = [flat(record.gradient) for record in records.values()]
        shapes = {name: record.gradient.shape[1:] for name, record in records.items()}
        return cls(rows[0] if len(rows) == 1 else torch.cat(rows, 1), shapes)

    def norm_sq(self) -> Tensor:
        """Squared norms [B] over all parameters."""
        return _norm_sq(self.rows)

    def clipped_sums(self, clip_coef_B: Tensor) -> dict[str, Tensor]:
        """sum_i clip_coef_i * gradient_i of every parameter, by name."""
        total = clip_coef_B.to(self.rows.dtype) @ self.rows
        sizes = [shape.numel() for shape in self.shapes.values()]
        # Not views: each becomes a gradient of its own.
        parts: Sequence[Tensor] = [total] if len(sizes) == 1 else torch.split_with_sizes_copy(total, sizes)  # type: ignore[assignment]
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def without(self, nonfinite_B: Tensor) -> FusedGrads:
        """Return a copy with exact zeros for `nonfinite_B` (bool [B])."""
        return FusedGrads(zero_rows(self.rows, nonfinite_B), self.shapes)


def _norm_sq(rows: Tensor) -> Tensor:
    if rows.shape[1] <= _SMALL and is_at_hand(rows):
        return short_norm_sq(rows)
    return norms(rows).square()


_SMALL = 2**12
"""Largest size of a small gradient, in elements of one sample."""
