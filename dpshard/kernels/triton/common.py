"""Multiplication in kernels. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def factor_of_dot(x):
    """Return `x` as a factor of tl.dot, so that products are exact in float32."""
    # The interpreter would multiply the bit patterns of bfloat16 as integers.
    if _INTERPRETED:
        return x.to(tl.float32)
    else:  # noqa: RET505 - Triton compiles only the taken branch, and needs both
        return x
