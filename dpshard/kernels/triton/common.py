"""Multiplication in kernels, and a test launch of Triton. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def factor_of_dot(x):
    """Return `x` as `tl.dot` takes it: half precision, whose products are exact in float32."""
    # The interpreter holds bfloat16 as bits, and would multiply those.
    if _INTERPRETED:
        return x.to(tl.float32)
    else:  # noqa: RET505 - Triton compiles only the taken branch, and needs both
        return x


@triton.jit
def _touch(x):
    tl.store(x, 1.0)


def launch(device: torch.device) -> None:
    """Compile and launch a kernel; raise any error of it: no C compiler, a driver that is too old, ..."""
    with torch.cuda.device(device):
        _touch[(1,)](torch.empty(1, device=device))
