"""How sums over records are taken: never in half precision, and no norm below what rounding hides."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def as_real(x: Tensor) -> Tensor:
    """`x`; of a complex one its real and imaginary parts, [..., 2], of which norms, sums and noise are taken."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: Tensor, like: torch.dtype) -> Tensor:
    """The inverse of `as_real`, for a tensor that is of the dtype `like`."""
    return torch.view_as_complex(x.contiguous()) if like.is_complex else x


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is wider: norms and sums never accumulate in half precision."""
    return x if x.dtype in _WIDE else x.float()


def accum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are taken in."""
    return x.dtype if x.dtype in _WIDE else torch.float32


def flat(x: Tensor) -> Tensor:
    """`x` [B, *shape] as wide rows [B, elements]; a scalar parameter has one element."""
    return wide(x).reshape(len(x), x.shape[1:].numel())


def norms(x: Tensor) -> Tensor:
    """The norm of each sample [B] of `x` [B, ...], float32 or wider."""
    rows, dtype = x.reshape(len(x), x.shape[1:].numel()), accum_dtype(x)
    whole = rows.shape[1] // _LONG * _LONG
    if not whole:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    # On a CPU the squares of a row are few sums, which large ones keep from growing by small ones.
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _LONG)), dim=2, dtype=dtype)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True, dtype=dtype)
    return torch.linalg.vector_norm(torch.cat((parts, rest), 1), dim=1)


def blank(x: Tensor, nonfinite_B: Tensor) -> Tensor:
    """`x` [B, ...] with exact zeros for the samples of `nonfinite_B` (bool [B])."""
    # masked_fill, not a product: 0 * NaN is NaN.
    return x.masked_fill(nonfinite_B.view(-1, *[1] * (x.dim() - 1)), 0)


def gram(x: Tensor, start: int = 0) -> Tensor:
    """Inner products [..., T - start, T] of the vectors from `start` on with all of `x` [..., T, n]."""
    # A library may sum in one go: the rounding of sums as long as a vocabulary would be more than gram_floor allows.
    parts = x.split(_CHUNK, dim=-1)
    return functools.reduce(Tensor.add_, (part[..., start:, :] @ part.mT for part in parts))


_LONG = 2**16
"""Squares that are summed in one go."""

_CHUNK = 2048
"""Products that are summed in one go."""

RESOLUTION = 1024
"""Roundings by which a sum may be off, in units of eps times the sum of the absolute values of its terms."""


def gram_floor(scale_sq: Tensor) -> Tensor:
    """The squared norm below which a sum of inner products, as large as `scale_sq` in all, is lost to rounding.

    What cancels in a sum of inner products is lost, but not in the clipped sum: a norm that comes out too small would
    let a sample contribute more than the threshold. So no norm is taken to be below this. Positions whose gradients
    are orthogonal have the squared norm scale_sq / T, which is below it from T = 8,192 on in float32.
    """
    return relative_floor(scale_sq.dtype) * scale_sq


def underflow_slack(rows: Tensor, cols: Tensor, overlap: float = 1.0) -> Tensor:
    """What squares that underflow may hide of the norms [B] of sums of products of `rows` and `cols` [B, ...].

    The norm of all columns that take part is at most `overlap` times that of `cols`: a convolution has windows of them.

    Half of the exponents are too small to be squared: a row whose norm is measured as 0 may meet a column that is as
    large as 1e19. What is lost of a norm is at most a root of the smallest normal number for each element; of data
    between 1e-10 and 1e10 no digit of the norm.
    """
    of_rows, of_cols = _lost(rows), overlap * _lost(cols)
    # of_rows (|cols| + of_cols) + of_cols (|rows| + of_rows), in few operations
    return torch.add(norms(cols) * (overlap * of_rows), norms(rows), alpha=of_cols) + 2 * of_rows * of_cols


def norm_upper_bounds(x: Tensor) -> Tensor:
    """The norm of each sample [B] of `x` [B, ...], with all that squares that underflow may hide of it."""
    return norms(x) + _lost(x)


def _lost(x: Tensor) -> float:
    """What squares that underflow may hide of the norm of a sample of `x` [B, ...]."""
    return (x.shape[1:].numel() * torch.finfo(accum_dtype(x)).tiny) ** 0.5


def relative_floor(dtype: torch.dtype) -> float:
    """What a sum in `dtype` may be off by, over the sum of the absolute values of its terms."""
    return RESOLUTION * torch.finfo(dtype).eps


def sum_floor(scale: Tensor) -> Tensor:
    """The same for the norm of a sum of gradients of norms `scale` in all: the norm, not its square, is off by eps."""
    return relative_floor(scale.dtype) * scale
