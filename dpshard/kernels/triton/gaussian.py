"""Noise in one pass; philox.py defines it. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpshard.kernels.philox import HALF


@triton.jit(do_not_specialize=["blocks", "vectors", "start", "n"])
def _release(
    x, streams, weights, squares, blocks, vectors, start, n, std, divisor, BLOCK: tl.constexpr, HALF: tl.constexpr
):
    """Write (x + std * noise) / divisor for 2 HALF elements, and the sum of squares of x."""
    pid = tl.program_id(0)
    origin = (pid.to(tl.int64) + start // (2 * HALF)) * (2 * HALF)
    stream = streams + 3 * (origin // BLOCK - start // BLOCK)
    counter = (origin % BLOCK // 2).to(tl.int32) + tl.arange(0, HALF)
    same = counter * 0
    by_cosine = tl.zeros((HALF,), dtype=tl.float32)
    by_sine = tl.zeros((HALF,), dtype=tl.float32)
    for vector in range(vectors):
        key, low, high = tl.load(stream), tl.load(stream + 1), tl.load(stream + 2)
        weight = tl.load(weights + vector)
        upper_1, upper_2, upper_3 = same + low.to(tl.int32), same + (low >> 32).to(tl.int32), same + high.to(tl.int32)
        first, second, third, _ = tl.philox(key, counter, upper_1, upper_2, upper_3)
        fine = (second & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 2.0**-31 + 2.0**-32
        uniform = ((first & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + fine) * 2.0**-31
        radius = tl.sqrt_rn(-2.0 * tl.log(uniform))
        angle = third.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # pi 2^-31
        by_cosine += weight * (radius * tl.cos(angle))
        by_sine += weight * (radius * tl.sin(angle))
        stream += 3 * blocks
    at = origin - start + tl.arange(0, HALF)
    square = tl.zeros((HALF,), dtype=tl.float32)
    for half in tl.static_range(2):
        here = (at >= 0) & (at < n)
        old = tl.load(x + at, mask=here, other=0.0)
        square += old * old
        if half == 0:
            noise = by_cosine
        else:
            noise = by_sine
        tl.store(x + at, tl.div_rn(old + std * noise, divisor), mask=here)
        at += HALF
    tl.store(squares + pid, tl.sum(square, 0))


def release_(x: Tensor, streams: Tensor, weights: Tensor, block: int, start: int, std: float, divisor: float) -> Tensor:
    """Launch the kernel; see operators.release_."""
    tiles = -(-(start + len(x)) // (2 * HALF)) - start // (2 * HALF)
    squares = torch.empty(tiles, dtype=torch.float32, device=x.device)
    vectors, blocks, _ = streams.shape
    _release[(tiles,)](
        x, streams, weights, squares, blocks, vectors, start, len(x), std, divisor, BLOCK=block, HALF=HALF
    )
    return squares.double().sum()
