"""A few numbers a sample, on the CPU: numpy takes a fifth of the time that torch takes for so short vectors.

Elsewhere torch computes them, and nobody waits. Both round alike: each operation here is one that IEEE 754 defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpshard.kernels.underflow import hidden


def is_at_hand(x: Any) -> bool:
    """Return True if the numbers of `x` can be read now: not on an accelerator, nor while torch only plans a step."""
    return type(x) is Tensor and x.device.type == "cpu"


def array(x: Tensor) -> Any:
    """Return `x`, which is at hand, as an array that shares its memory."""
    return (x.detach() if x.requires_grad else x).numpy()


def arrays_of(*tensors: Any) -> tuple[Any, list[Any]]:
    """Return numpy and `tensors` as its arrays, if all are at hand; else torch and the tensors. Keep numbers."""
    if not all(is_at_hand(x) for x in tensors if isinstance(x, Tensor)):
        return torch, list(tensors)
    return np, [array(x) if isinstance(x, Tensor) else x for x in tensors]


def elementwise(function: Callable[..., Any], *operands: Tensor | float) -> Tensor:
    """Return `function(numpy or torch, *operands)` of vectors of equal length and of numbers."""
    xp, arrays = arrays_of(*operands)
    if xp is torch:
        return function(xp, *arrays)
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(xp, *arrays)))


def constant(xp: Any, value: float, like: Any) -> Any:
    """Return `value` in the dtype of the array `like`, to compute with it as torch would not with a number.

    torch takes number / tensor for a product with the reciprocal, which is rounded twice and may overflow.
    """
    return torch.full_like(like, value) if xp is torch else like.dtype.type(value)


def total(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of vectors of equal length, at least one."""
    if len(vectors) == 1:
        return vectors[0]
    if all(is_at_hand(x) for x in vectors):
        with np.errstate(all="ignore"):
            first, *others = [array(x) for x in vectors]
            return torch.from_numpy(first + others[0] if len(others) == 1 else np.stack([first, *others]).sum(0))
    return torch.stack(list(vectors)).sum(0) if len({x.dtype for x in vectors}) == 1 else sum(vectors[1:], vectors[0])


def all_finite(x: Tensor) -> bool | None:
    """Return whether all numbers of `x` are finite; None if an accelerator would be waited for."""
    return bool(np.isfinite(array(x)).all()) if is_at_hand(x) else None


def short_norm_sq(rows: Tensor) -> Tensor:
    """Return what `norms(rows).square()` is, for short rows [B, n] that are at hand."""
    x = array(rows)
    with np.errstate(all="ignore"):
        norm_B = np.sqrt(np.einsum("bn,bn->b", x, x)) + x.dtype.type(hidden(x.shape[1], rows.dtype) ** 0.5)
        return torch.from_numpy(norm_B * norm_B)
