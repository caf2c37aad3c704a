"""The parts of shards under one key each: blocks, and the short pieces of blocks, whose noise is drawn together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpshard.kernels import native
from dpshard.randomness import UNIT, derive_key, first_bytes

_TOGETHER = 2**20
"""Bytes of random streams per batch of short pieces: more do not fit the cache."""


class Block(NamedTuple):
    """The part of a shard in one block of a flattened parameter."""

    name: str
    number: int
    lo: int
    """Position of the first element in the block."""
    part: Tensor
    """Contiguous, any shape."""


class Piece(NamedTuple):
    """Elements of a block that get consecutive normals of one stream."""

    key: bytes
    stretch: int
    """Normals that are drawn at once under the key."""
    lo: int
    """Position in the stream of the key."""
    end: int
    part: Tensor
    """Contiguous, any shape."""
    first: int
    """The first element, in the flattened `part`."""

    @property
    def elements(self) -> Tensor:
        """The elements [end - lo], a view."""
        return self.part.detach().view(-1)[self.first : self.first + self.end - self.lo]


def dense(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, else a contiguous copy."""
    return x if x.is_contiguous() else x.detach().contiguous()


def blocks_of(name: str, start: int, x: Tensor, size: int) -> list[Block]:
    """Return the blocks of `size` elements that meet `x`, contiguous, elements from `start` on of a parameter."""
    n = x.numel()
    if n and start % size + n <= size:
        return [Block(name, start // size, start % size, x)]
    flat, stop, found = x.detach().view(-1), start + n, []
    for number in range(start // size, -(-stop // size)):
        lo, hi = max(start, number * size), min(stop, (number + 1) * size)
        found.append(Block(name, number, lo - number * size, flat[lo - start : hi - start]))
    return found


def cut(block: Block, key: bytes, head: int) -> list[Piece]:
    """Return the head of a block, and the rest under a key of its own; without what is empty."""
    lo, part = block.lo, block.part
    end, n = lo + part.numel(), head - lo
    if end <= head:
        return [Piece(key, head, lo, end, part, 0)]
    rest = derive_key(key, "rest")
    if n <= 0:
        return [Piece(rest, UNIT, lo - head, end - head, part, 0)]
    return [Piece(key, head, lo, head, part, 0), Piece(rest, UNIT, 0, end - head, part, n)]


def release_short_(pieces: Sequence[Piece], keys: Sequence[bytes], std: float, divisor: float, *, wide: bool) -> None:
    """Turn pieces x of one dtype and device into (x + std * noise) / divisor, noise in float64 if `wide`.

    `keys`: as many for every piece, one piece after another; the noise is the scaled sum of their normals.
    """
    if not pieces[0].part.is_cpu:
        parts = [piece.elements for piece in pieces]
        sizes = [part.numel() for part in parts]
        joined = torch.cat(parts)
        host = joined.cpu()
        copies = zip(pieces, host.split(sizes), strict=True)
        release_short_([piece._replace(part=part, first=0) for piece, part in copies], keys, std, divisor, wide=wide)
        torch._foreach_copy_(parts, joined.copy_(host).split(sizes))
        return
    summands = len(keys) // len(pieces)
    natively = [native.Piece(part, first, n // 2, lo, end) for _, n, lo, end, part, first in pieces]
    sizes = [piece.nbytes(wide=wide) for piece in natively]
    for start, stop in _batches(sizes, _TOGETHER // summands):
        of_streams = [size for size in sizes[start:stop] for _ in range(summands)]
        streams = first_bytes(keys[start * summands : stop * summands], of_streams)
        native.release_pieces_(natively[start:stop], streams, std, divisor, wide=wide)


def _batches(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive indices whose sizes add up to `most`, or of one."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)
