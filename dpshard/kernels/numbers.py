"""How kernels multiply. Needs Triton."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton is optional, and its decorators hide what they return.

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def factor_of_dot(x):
    """`x` as `tl.dot` takes it: half precision, whose products are exact in float32."""
    # The interpreter holds bfloat16 as bits, and would multiply those.
    if _INTERPRETED:
        return x.to(tl.float32)
    else:  # noqa: RET505 - Triton compiles the branch that is taken, and needs both
        return x
