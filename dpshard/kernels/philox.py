"""Normals by element index: the definition of noise on GPUs.

Philox with 4 words of 32 bits and 10 rounds is a stateless function of a key and a counter. (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3".) It is not a cipher. Every device can compute elements [a, b) without the
others. They are equal up to the last bits of a logarithm and a cosine.

160 bits identify a stream: the key, and the upper three words of the counter. With 64 bits, two of 10^9 blocks would
have equal noise with a probability of 2.7%. Element k lies in half k // HALF % 2 of a tile of 2 HALF elements. Both
halves share the counters k // (2 HALF) * HALF + k % HALF. By Box and Muller's method the first takes the cosine, the
second the sine. The radius has 62 bits, so tails reach 9.3 standard deviations. The angle has 24 bits in float32, and
53 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF = 512
"""Counters per tile; another value would change the noise of every stream."""

Stream = Sequence[int]
"""64-bit integers: the key, and 96 bits for the counter, the lowest first."""

_WORD = 0xFFFFFFFF


def philox(stream: Stream, counter: Tensor) -> list[Tensor]:
    """Return four random words of 32 bits, int64 in [0, 2**32), for every counter (the same range) of `stream`."""
    key, low, high = stream
    key_0, key_1 = key & _WORD, key >> 32 & _WORD
    upper = (low & _WORD, low >> 32 & _WORD, high & _WORD)
    c0, c1, c2, c3 = counter, *(torch.full_like(counter, word) for word in upper)
    for _ in range(10):
        # Products wrap around into the sign; the mask after the shift removes copies of the sign.
        product_0, product_2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product_2 >> 32 & _WORD) ^ c1 ^ key_0, product_2 & _WORD
        c2, c3 = (product_0 >> 32 & _WORD) ^ c3 ^ key_1, product_0 & _WORD
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def standard_normals(
    stream: Stream, start: int, stop: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return elements [start, stop) of `stream`, in float32 or float64; stop is at most 2**32."""
    first, last = start // (2 * HALF), -(-stop // (2 * HALF))
    words = philox(stream, torch.arange(first * HALF, last * HALF, device=device))
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


def release_(x: Tensor, streams: Tensor, weights: Tensor, block: int, start: int, std: float, divisor: float) -> Tensor:
    """Do what triton.release_ does for one tensor x [n], in float32 or float64; `streams` are those of its blocks."""
    norm_sq = torch.linalg.vector_norm(x).double().square()
    at, weight_V, streams_VB = 0, weights.tolist(), streams.tolist()
    for number, stream_V in enumerate(zip(*streams_VB, strict=True), start=start // block):
        first = start + at - number * block
        last = min(block, first + len(x) - at)
        noise = torch.zeros(last - first, dtype=x.dtype, device=x.device)
        for stream, weight in zip(stream_V, weight_V, strict=True):
            noise.add_(standard_normals(stream, first, last, x.dtype, x.device), alpha=weight)
        x[at : at + len(noise)].add_(noise, alpha=std)
        at += len(noise)
    x.div_(divisor)
    return norm_sq


def _signed(word: Tensor) -> Tensor:
    return word - (word >> 31 << 32)
