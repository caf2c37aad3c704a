"""Records of the per-sample gradients themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels import triton
from dpshard.records.host import is_at_hand, short_norm_sq
from dpshard.records.numerics import as_real, flat, norms, wide, zero_rows


@dataclass(frozen=True, slots=True)
class PerSampleGrad:
    """Per-sample gradients [B, *shape]."""

    gradient: Tensor

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]."""
        if triton.supports_row_norms(self.gradient):
            return triton.row_norm_sq(_rows(self.gradient))
        return _norm_sq(flat(self.gradient)) if self.is_small else norms(self.gradient).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return wide(self.gradient)

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        shape = self.gradient.shape[1:]
        if triton.supports_rows(self.gradient):
            total = triton.weighted_rows(_rows(self.gradient)[None], sum_weight_B.float()[None])[0]
        else:
            rows = flat(self.gradient)
            total = sum_weight_B.to(rows.dtype) @ rows  # FLOP counters count a matrix product
        return total if len(shape) == 1 else total.view(shape)

    def real(self) -> PerSampleGrad:
        """Return real pairs for complex numbers."""
        return PerSampleGrad(as_real(self.gradient))

    def without(self, nonfinite_B: Tensor) -> PerSampleGrad:
        """Zero the samples `nonfinite_B`."""
        if triton.supports_rows(self.gradient):
            return self  # the kernel reads no sample of weight 0
        return PerSampleGrad(zero_rows(self.gradient, nonfinite_B))

    @property
    def is_small(self) -> bool:
        """True if calls cost more than arithmetic."""
        return self.gradient.shape[1:].numel() <= _SMALL


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(len(x), x.shape[1:].numel())


def _norm_sq(rows: Tensor) -> Tensor:
    if rows.shape[1] <= _SMALL and is_at_hand(rows):
        return short_norm_sq(rows)
    return norms(rows).square()


_SMALL = 2**12
"""Most elements of a small gradient of one sample."""
