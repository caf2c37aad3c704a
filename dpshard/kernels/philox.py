"""Normals by the element, for GPUs: the definition of their noise.

Philox with 4 words of 32 bits and 10 rounds is a stateless function of a key and a counter: Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3". Elements [a, b) can be computed without the others, and are the same on
every device, up to the last bits of a logarithm and a cosine. (torch.randn on a GPU depends on the number of
multiprocessors, and a part of a tensor is not the tensor's part.) It passes statistical tests but is not a cipher.

The key is a seed of 64 bits. Element k lies in half k // HALF % 2 of a tile of 2 HALF elements. Both halves share the
counters k // (2 HALF) * HALF + k % HALF. By Box and Muller's method the first takes the cosine and the second the sine.
The radius has 62 bits, so tails reach 9.3 standard deviations; the angle has 32 bits in float32 and 64 in float64.
`release_` adds the noise; `triton.release_` does the same in one pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF = 512
"""Counters per tile; part of the meaning of a seed."""

_WORD = 0xFFFFFFFF


def philox(seed: int, counter: Tensor) -> list[Tensor]:
    """Return four random words of 32 bits, int64 in [0, 2**32), for every counter (the same range) under `seed`."""
    key_0, key_1 = seed & _WORD, seed >> 32 & _WORD
    c0, c1, c2, c3 = counter, *[torch.zeros_like(counter)] * 3
    for _ in range(10):
        # 64-bit products wrap around into the sign; the mask after the shift removes copies of the sign.
        product_0, product_2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product_2 >> 32 & _WORD) ^ c1 ^ key_0, product_2 & _WORD
        c2, c3 = (product_0 >> 32 & _WORD) ^ c3 ^ key_1, product_0 & _WORD
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def standard_normals(
    seed: int, start: int, stop: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Elements [start, stop) of the stream under `seed`, in float32 or float64; stop is at most 2**32."""
    first, last = start // (2 * HALF), -(-stop // (2 * HALF))
    words = philox(seed, torch.arange(first * HALF, last * HALF, device=device))
    radius, fine = ((word & 2**31 - 1).to(dtype) for word in words[:2])
    # (w + (w' + 1/2) 2^-31) 2^-31 in (0, 1]: tails come from values near 0, where all bits count.
    uniform = (radius + (fine * 2.0**-31 + 2.0**-32)) * 2.0**-31
    radius = (-2.0 * uniform.log()).sqrt()
    angle = _signed(words[2]).to(dtype)
    if dtype == torch.float64:
        angle += _signed(words[3]).to(dtype) * 2.0**-32
    angle *= math.pi * 2.0**-31
    halves = torch.stack([(radius * turn).view(-1, HALF) for turn in (angle.cos(), angle.sin())], 1)
    return halves.view(-1)[start - first * 2 * HALF :][: stop - start]


def release_(x: Tensor, seeds: Tensor, block: int, start: int, std: float, divisor: float) -> Tensor:
    """See triton.release_; here in float32 or float64."""
    norm_sq = torch.linalg.vector_norm(x).double().square()
    at = 0
    for number, seed in enumerate(seeds.tolist(), start=start // block):
        first = start + at - number * block
        noise = standard_normals(seed, first, min(block, first + len(x) - at), x.dtype, x.device)
        x[at : at + len(noise)].add_(noise, alpha=std)
        at += len(noise)
    x.div_(divisor)
    return norm_sq


def _signed(word: Tensor) -> Tensor:
    return word - (word >> 31 << 32)
