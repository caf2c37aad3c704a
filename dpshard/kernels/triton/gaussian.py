"""Noise in one launch; philox.py defines it. Needs Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.philox import HALF
from dpshard.kernels.triton import tables


@triton.jit(do_not_specialize=["blocks", "vectors"])
def _release(
    places, owners, streams, weights, squares, blocks, vectors, std, divisor, BLOCK: tl.constexpr, HALF: tl.constexpr
):
    """Write (x + std * noise) / divisor for 2 HALF elements, and the sum of squares of x.

    The tensor of a program is its owner. Its place has an address, start, n, its first program, and its first block.
    """
    pid = tl.program_id(0)
    place = places + 5 * tl.load(owners + pid)
    x = tl.load(place).to(tl.pointer_type(tl.float32))
    start, n = tl.load(place + 1), tl.load(place + 2)
    origin = (pid - tl.load(place + 3) + start // (2 * HALF)) * (2 * HALF)
    stream = streams + 3 * (tl.load(place + 4) + origin // BLOCK - start // BLOCK)
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


def release_(
    xs: Sequence[Tensor],
    starts: Sequence[int],
    firsts: Sequence[int],
    streams: Tensor,
    weights: Tensor,
    block: int,
    std: float,
    divisor: float,
) -> Tensor:
    """Launch the kernel; see operators.release_."""
    layout, owners = _layout(tuple(map(Tensor.numel, xs)), tuple(starts), tuple(firsts), streams.device)
    squares = torch.empty(len(owners), dtype=torch.float32, device=streams.device)
    vectors, blocks, _ = streams.shape
    places = tables.with_addresses(xs, layout, torch.float32, streams.device)
    _release[(len(owners),)](
        places, owners, streams, weights, squares, blocks, vectors, std, divisor, BLOCK=block, HALF=HALF
    )
    return squares.double().sum()


@functools.lru_cache(maxsize=8)  # the same tensors at every step
def _layout(
    sizes: tuple[int, ...], starts: tuple[int, ...], firsts: tuple[int, ...], device: torch.device
) -> tuple[NDArray[np.int64], Tensor]:
    """Return places without their addresses, and the owner of each program."""
    first, n = np.array(starts, np.int64), np.array(sizes, np.int64)
    programs = -(-(first + n) // (2 * HALF)) - first // (2 * HALF)
    return np.stack([first, n, tables.before(programs), np.array(firsts, np.int64)], 1), tables.owners(programs, device)
