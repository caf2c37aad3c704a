"""Sums over records, never in half precision; norms include bounds on rounding and underflow."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dpshard.kernels.underflow import hidden

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes of sums; others are widened to float32."""


_MOST_INDEX_TENSORS = 1024
_index_tensors: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}  # not lru_cache: dynamo warns about it


def index_tensor(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """Return `numbers` on the device of `like`, int64; copying them anew would make an accelerator wait."""
    key = numbers, like.device
    kept = _index_tensors.get(key) if type(like) is Tensor else None  # a FakeTensor has no values
    if kept is not None:
        return kept
    made = torch.tensor(numbers, dtype=torch.int64, device=like.device)
    if type(like) is type(made) is Tensor and not made.is_inference():
        if len(_index_tensors) >= _MOST_INDEX_TENSORS:
            _index_tensors.clear()
        _index_tensors[key] = made
    return made


def as_real(x: Tensor) -> Tensor:
    """Return `x`, or real and imaginary parts [..., 2]."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: Tensor, like: torch.dtype) -> Tensor:
    """Invert `as_real`, for dtype `like`."""
    return torch.view_as_complex(x.contiguous()) if like.is_complex else x


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32 or wider."""
    return x if x.dtype in WIDE else x.float()


def accum_dtype(x: Tensor) -> torch.dtype:
    """Dtype of sums over `x`."""
    return x.dtype if x.dtype in WIDE else torch.float32


def flat(x: Tensor) -> Tensor:
    """Return `x` [B, *shape] as wide rows [B, elements]."""
    return wide(x) if x.dim() == 2 else wide(x).reshape(x.shape[0], x.shape[1:].numel())


def norms(x: Tensor, dims: int = 1) -> Tensor:
    """Norms over all but the first `dims` dimensions, plus a bound on what underflow hides; float32 or wider."""
    n, dtype = x.shape[dims:].numel(), accum_dtype(x)
    rows, whole = x.reshape(*x.shape[:dims], n), n // _LONG * _LONG
    if whole:
        # CPUs add into few sums, where a large sum swallows small squares.
        parts = torch.linalg.vector_norm(rows[..., :whole].unflatten(-1, (-1, _LONG)), dim=-1, dtype=dtype)
        rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True, dtype=dtype)
        rows = torch.cat((parts, rest), -1)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype) + hidden(n, dtype) ** 0.5


def zero_rows(x: Tensor, nonfinite_B: Tensor) -> Tensor:
    """Return `x` [B, ...] with zeros for `nonfinite_B` (bool [B])."""
    # Not a product: 0 * NaN is NaN.
    return x.masked_fill(nonfinite_B.view(-1, *[1] * (x.dim() - 1)), 0)


def has_atomics(device: torch.device) -> bool:
    """Return True if index_add_ is not deterministic on this device."""
    return device.type != "cpu"


def add_rows(values: Tensor, rows_N: Tensor, count: int) -> Tensor:
    """Sum values [N, *shape] by row, [count, *shape], deterministically."""
    if values.is_complex() or not has_atomics(values.device):
        return values.new_zeros(count, *values.shape[1:]).index_add_(0, rows_N, values)
    flat_NC = values.reshape(len(values), values.shape[1:].numel())
    total = torch.ops.aten.embedding_dense_backward(flat_NC, rows_N, count, -1, False)
    return total.view(count, *values.shape[1:])


def places_in_runs(key_N: Tensor, count_K: Tensor) -> Tensor:
    """Return the place [N] of each row among the rows of its key; `count_K`: rows of each key."""
    order = key_N.argsort(stable=True)
    place_N = torch.empty_like(key_N)
    place_N[order] = torch.arange(len(key_N), device=key_N.device) - (count_K.cumsum(0) - count_K)[key_N[order]]
    return place_N


def gram(x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Inner products [..., stop - start, stop] of the vectors [start, stop) of x [..., T, n] with the first `stop`.

    The diagonal includes a bound on what underflow hides.
    """
    T, n = x.shape[-2:]
    # A single sum over a vocabulary would round by more than the floor.
    parts = x[..., :stop, :].split(_CHUNK, dim=-1)
    product = functools.reduce(Tensor.add_, (part[..., start:, :] @ part.mT for part in parts))
    product.diagonal(start, -2, -1).add_(hidden(T * n, x.dtype))
    return product


_LONG = 2**16
"""Squares in one sum."""

_CHUNK = 2048
"""Products in one sum."""

RESOLUTION = 1024
"""|error of a sum| <= RESOLUTION * eps * sum(|terms|)."""


def relative_floor(dtype: torch.dtype) -> float:
    """RESOLUTION * eps."""
    return RESOLUTION * torch.finfo(dtype).eps


def gram_bound(norm_sq: Tensor, scale: Tensor) -> Tensor:
    """Upper bounds [B] of squared norms that were measured as sums `norm_sq` [B] of inner products.

    `scale` [B]: sum of the norms of the gradients in them. Inner products may cancel until rounding hides the norm,
    which the clipped sum keeps. Then a sample could exceed the threshold. So no squared norm may be below the rounding
    error of scale^2. For orthogonal gradients of equal norm, this raises norms from T = 8,192 in float32.
    """
    # abs: a sum of inner products may be -inf.
    return torch.maximum(norm_sq.abs(), relative_floor(scale.dtype) * scale.square())


def sum_floor(scale: Tensor) -> Tensor:
    """Norms below which rounding may lose a sum; `scale`: the sum of the norms."""
    return relative_floor(scale.dtype) * scale


def checksum(x: Tensor) -> Tensor:
    """Return the sum [] of the bits of `x`, as int64 words that wrap around: equal in any order."""
    x = as_real(x)
    if x.dtype == torch.float64:
        words = x.detach().contiguous().view(torch.int64)
        # A factor of two adds 2^52 to every word; over 4,096 words that wraps to 0. Upper halves do not wrap.
        return words.sum() + (words >> 32).sum()
    flat = x.detach().contiguous().view(-1)
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        return flat.view(torch.int64).sum()
    octets = flat.view(torch.uint8)
    start = -octets.storage_offset() % 8  # words are aligned
    stop = start + (len(octets) - start) // 8 * 8
    if stop <= start:
        return octets.sum()
    total = octets[start:stop].view(torch.int64).sum()
    rest = torch.cat([octets[:start], octets[stop:]])
    return total + rest.sum() if len(rest) else total
