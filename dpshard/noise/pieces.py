"""The parts of shards under one key each: blocks, and their short pieces, whose noise is drawn together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels import native
from dpshard.randomness import UNIT, derive_key, first_bytes

_TOGETHER = 2**20
"""Bytes of random streams per batch: as many as fit the cache."""


class Block(NamedTuple):
    """The part of a shard in one block of a parameter."""

    name: str
    number: int
    lo: int
    """Place of the first element in the block."""
    part: Tensor
    """Contiguous, any shape, at least one element."""

    @property
    def elements(self) -> Tensor:
        """Return the elements of `part` [n], without a gradient."""
        return self.part.detach().view(-1)


class LongPiece(NamedTuple):
    """The rest of a block, of several stretches of its stream."""

    block: int
    first: int
    lo: int
    """Place in the stream of the key."""
    end: int


class Pieces(NamedTuple):
    """A plan for the noise of some blocks."""

    short: NDArray[np.int64]
    """Rows of native.release_pieces_, in the order of the blocks."""
    of_rest: tuple[bool, ...]
    """Whether the key of each is that of the rest of the block."""
    sizes: tuple[int, ...]
    """Bytes of a stream for each."""
    long: tuple[LongPiece, ...]


def dense(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, else a contiguous copy."""
    return x if x.is_contiguous() else x.detach().contiguous()


def blocks_of(name: str, start: int, x: Tensor, size: int) -> list[Block]:
    """Return the blocks of `size` elements that meet `x`, contiguous elements of a parameter from `start` on."""
    n = x.numel()
    if start % size + n <= size:
        return [Block(name, start // size, start % size, x)]
    flat, stop, found = x.detach().view(-1), start + n, []
    for number in range(start // size, -(-stop // size)):
        lo, hi = max(start, number * size), min(stop, (number + 1) * size)
        found.append(Block(name, number, lo - number * size, flat[lo - start : hi - start]))
    return found


@functools.lru_cache(maxsize=16)
def cut(spans: tuple[tuple[int, int], ...], head: int, *, wide: bool) -> Pieces:
    """Cut blocks of elements [lo, lo + n) into heads of `head` elements and rests; `wide`: for float64."""
    short: list[tuple[int, ...]] = []
    of_rest: list[bool] = []
    long: list[LongPiece] = []
    for block, (start, n) in enumerate(spans):
        end = start + n
        if start < head:
            short.append((block, 0, head // 2, start, min(end, head)))
            of_rest.append(False)
        if end > head:
            first, lo = max(0, head - start), max(0, start - head)
            if end - head > UNIT:
                long.append(LongPiece(block, first, lo, end - head))
            else:
                short.append((block, first, UNIT // 2, lo, end - head))
                of_rest.append(True)
    rows = np.array(short, np.int64).reshape(-1, 5)
    return Pieces(rows, tuple(of_rest), tuple(native.bytes_of_streams(rows, wide=wide).tolist()), tuple(long))


def release_short_(
    parts: Sequence[Tensor], pieces: Pieces, keys: Sequence[bytes], std: float, divisor: float, *, wide: bool
) -> None:
    """Turn the short pieces x of `parts`, of one dtype and device, into (x + std * noise) / divisor.

    The noise of a piece is the scaled sum of normals of its successive `keys`, float64 if `wide`.
    """
    if not keys:
        return
    if not parts[0].is_cpu:
        _release_elsewhere_(parts, pieces, keys, std, divisor, wide=wide)
        return
    rows, sizes = pieces.short, pieces.sizes
    summands = len(keys) // len(rows)
    for start, stop in _batches(sizes, _TOGETHER // summands):
        of_streams = [size for size in sizes[start:stop] for _ in range(summands)]
        streams = first_bytes(keys[start * summands : stop * summands], of_streams)
        first, last = int(rows[start, 0]), int(rows[stop - 1, 0])
        own = rows[start:stop] - [first, 0, 0, 0, 0]
        native.release_pieces_(parts[first : last + 1], own, streams, std, divisor, wide=wide)


def _release_elsewhere_(
    parts: Sequence[Tensor], pieces: Pieces, keys: Sequence[bytes], std: float, divisor: float, *, wide: bool
) -> None:
    spans = [(block, first, end - lo) for block, first, _, lo, end in pieces.short.tolist()]
    elements = [parts[block].detach().view(-1)[first : first + n] for block, first, n in spans]
    sizes = [n for _, _, n in spans]
    joined = torch.cat(elements)
    host = joined.cpu()
    rows = pieces.short.copy()
    rows[:, 0], rows[:, 1] = np.arange(len(rows)), 0
    release_short_(host.split(sizes), pieces._replace(short=rows), keys, std, divisor, wide=wide)
    torch._foreach_copy_(elements, joined.copy_(host).split(sizes))


def keys_of_pieces(keys: Sequence[bytes], pieces: Pieces) -> list[bytes]:
    """Return the key of each short piece."""
    own = [keys[block] for block in pieces.short[:, 0].tolist()]
    return [rest_of(key) if of_rest else key for key, of_rest in zip(own, pieces.of_rest, strict=True)]


def rest_of(key: bytes) -> bytes:
    """Return the key of the rest of a block."""
    return derive_key(key, "rest")


def _batches(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of indices whose sizes add up to at most `most`, or of one index."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)
