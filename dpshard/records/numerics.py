"""Sums over records: never in half precision, and no norm below what rounding and underflow hide."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dpshard.kernels.underflow import hidden

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes in which sums are kept as they are; others are widened to float32."""


def as_real(x: Tensor) -> Tensor:
    """Return `x`, or the real and imaginary parts [..., 2] of a complex one, for norms, sums and noise."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: Tensor, like: torch.dtype) -> Tensor:
    """Return the inverse of `as_real`, for a tensor of the dtype `like`."""
    return torch.view_as_complex(x.contiguous()) if like.is_complex else x


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32 or wider: norms and sums never accumulate in half precision."""
    return x if x.dtype in WIDE else x.float()


def accum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over `x`."""
    return x.dtype if x.dtype in WIDE else torch.float32


def flat(x: Tensor) -> Tensor:
    """Return `x` [B, *shape] as wide rows [B, elements]; a scalar parameter has one element."""
    return wide(x) if x.dim() == 2 else wide(x).reshape(x.shape[0], x.shape[1:].numel())


def norms(x: Tensor, dims: int = 1) -> Tensor:
    """Return norms over all but the first `dims` dimensions, with what underflow may hide; float32 or wider."""
    n, dtype = x.shape[dims:].numel(), accum_dtype(x)
    rows, whole = x.reshape(*x.shape[:dims], n), n // _LONG * _LONG
    if whole:
        # On a CPU the squares of a row are few sums, which large ones keep from growing by small ones.
        parts = torch.linalg.vector_norm(rows[..., :whole].unflatten(-1, (-1, _LONG)), dim=-1, dtype=dtype)
        rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True, dtype=dtype)
        rows = torch.cat((parts, rest), -1)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype) + hidden(n, dtype) ** 0.5


def zero_rows(x: Tensor, nonfinite_B: Tensor) -> Tensor:
    """Return `x` [B, ...] with exact zeros for the samples of `nonfinite_B` (bool [B])."""
    # masked_fill, not a product: 0 * NaN is NaN.
    return x.masked_fill(nonfinite_B.view(-1, *[1] * (x.dim() - 1)), 0)


def gram(x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return inner products [..., stop - start, stop] of the vectors from `start` on of x [..., T, n] with all of them.

    What underflow may hide of them is added to the diagonal; see [Note: Underflow].
    """
    T, n = x.shape[-2:]
    # A library may sum in one go: the rounding of sums as long as a vocabulary would be more than the floor allows.
    parts = x[..., :stop, :].split(_CHUNK, dim=-1)
    product = functools.reduce(Tensor.add_, (part[..., start:, :] @ part.mT for part in parts))
    product.diagonal(start, -2, -1).add_(hidden(T * n, x.dtype))
    return product


_LONG = 2**16
"""Squares that are summed in one go."""

_CHUNK = 2048
"""Products that are summed in one go."""

RESOLUTION = 1024
"""Roundings by which a sum may be off, in units of eps times the sum of the absolute values of its terms."""


def relative_floor(dtype: torch.dtype) -> float:
    """Return what a sum in `dtype` may be off by, over the sum of the absolute values of its terms."""
    return RESOLUTION * torch.finfo(dtype).eps


def gram_bound(norm_sq: Tensor, scale: Tensor) -> Tensor:
    """Return upper bounds [B] of squared norms that were measured as sums `norm_sq` of inner products.

    `scale` [B] is the sum of the norms of all gradients that the inner products are of. What cancels among them is lost
    to rounding, but not in the clipped sum. A norm that comes out too small would let a sample contribute more than
    the threshold. So no squared norm is below the rounding of scale^2. T positions of orthogonal gradients have the
    squared norm scale^2 / T, which is below it from T = 8,192 on in float32.
    """
    # abs: a sum of inner products may be infinite and negative.
    return torch.maximum(norm_sq.abs(), relative_floor(scale.dtype) * scale.square())


def sum_floor(scale: Tensor) -> Tensor:
    """Return the norms below which sums of gradients of the norms `scale` in all are lost to rounding."""
    return relative_floor(scale.dtype) * scale
