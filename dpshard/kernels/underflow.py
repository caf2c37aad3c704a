"""A bound on the underflow of a sum; every norm includes it.

[Note: Underflow]
In float32, the square of a number below 1e-19 loses bits or is zero. A large factor may make the loss visible: rows of
1e-23 and columns of 1e19 give gradients of 1e-4. Clipping is sound for any data if no measured norm is below the true
one. So a norm of n elements adds sqrt(hidden(n)). A Gram matrix of T positions and n columns adds hidden(T n) to its
diagonal. A ghost norm, or an inner product, adds `hidden` of its terms. docs/kernels.md has the proof.
numerics.RESOLUTION covers rounding.
"""

from __future__ import annotations

import torch


def hidden(terms: int, dtype: torch.dtype) -> float:
    """Return a bound on what underflow hides of a sum of `terms` squares or products in `dtype`."""
    return 8 * terms * torch.finfo(dtype).tiny
