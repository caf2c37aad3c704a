"""The parts of shards under one key each: blocks, and their short pieces, whose noise is drawn together.

A `Layout` of shards and its `BlockPieces` depend on neither keys nor values, so they are computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpshard.kernels import native
from dpshard.randomness import UNIT, derive_each


class BlockPart(NamedTuple):
    """The place of a part in one block of a parameter."""

    name: str
    number: int
    lo: int
    """Place of the first element in the block."""
    n: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The blocks of some shards, one shard after another."""

    spans: tuple[BlockPart, ...]
    counts: tuple[int, ...]
    """Blocks of each shard."""
    endings: list[tuple[str, int]]
    """Names and numbers with which the keys of blocks end."""


class Blocks(NamedTuple):
    """Parts of shards in one block each."""

    layout: Layout
    parts: Sequence[Tensor]
    """Contiguous, any shape."""


class LongPiece(NamedTuple):
    """The rest of a block, of several stretches of its stream."""

    block: int
    first: int
    lo: int
    """Place in the stream of the key."""
    end: int


class BlockPieces(NamedTuple):
    """A plan for the noise of some blocks."""

    short: native.Pieces | None
    """Short pieces, in the order of the blocks."""
    blocks: tuple[int, ...]
    """The block of each short piece."""
    rests: tuple[int, ...]
    """Places of the short pieces whose key is that of the rest of a block."""
    long: tuple[LongPiece, ...]


def dense(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, else a contiguous copy."""
    return x if x.is_contiguous() else x.detach().contiguous()


def blocks_of(names: Sequence[str], starts: Sequence[int], parts: Sequence[Tensor], size: int) -> Blocks:
    """Cut contiguous parts between blocks of `size` elements. `starts`: place of each part in its parameter."""
    layout = _layout(tuple(names), tuple(starts), tuple(map(Tensor.numel, parts)), size)
    if len(layout.spans) == len(parts):
        return Blocks(layout, parts)
    found: list[Tensor] = []
    for x, count in zip(parts, layout.counts, strict=True):
        spans = layout.spans[len(found) : len(found) + count]
        found += [x] if count == 1 else x.detach().view(-1).split([span.n for span in spans])
    return Blocks(layout, found)


def by_kind(blocks: Blocks) -> list[Blocks]:
    """Return blocks of one dtype and device each."""
    kinds = [(x.dtype, x.device) for x in blocks.parts]
    different = dict.fromkeys(kinds)
    if len(different) == 1:
        return [blocks]
    return [select(blocks, [i for i, other in enumerate(kinds) if other == kind]) for kind in different]


def select(blocks: Blocks, indices: Sequence[int]) -> Blocks:
    """Return some of the blocks."""
    return Blocks(_selected(blocks.layout, tuple(indices)), [blocks.parts[i] for i in indices])


@functools.lru_cache(maxsize=16)  # the same shards at every step
def _layout(names: tuple[str, ...], starts: tuple[int, ...], sizes: tuple[int, ...], block: int) -> Layout:
    spans: list[BlockPart] = []
    counts: list[int] = []
    for name, start, n in zip(names, starts, sizes, strict=True):
        numbers = range(start // block, -(-(start + n) // block))
        for number in numbers:
            lo, hi = max(start, number * block), min(start + n, (number + 1) * block)
            spans.append(BlockPart(name, number, lo - number * block, hi - lo))
        counts.append(len(numbers))
    return Layout(tuple(spans), tuple(counts), [(span.name, span.number) for span in spans])


@functools.lru_cache(maxsize=64)
def _selected(layout: Layout, indices: tuple[int, ...]) -> Layout:
    return Layout(tuple(layout.spans[i] for i in indices), (1,) * len(indices), [layout.endings[i] for i in indices])


@functools.lru_cache(maxsize=64)
def cut(layout: Layout, head: int) -> BlockPieces:
    """Cut blocks into heads of `head` elements and rests."""
    short: list[tuple[int, ...]] = []
    rests: list[int] = []
    long: list[LongPiece] = []
    for block, (_, _, start, n) in enumerate(layout.spans):
        end = start + n
        if start < head:
            short.append((block, 0, head // 2, start, min(end, head)))
        if end > head:
            first, lo = max(0, head - start), max(0, start - head)
            if end - head > UNIT:
                long.append(LongPiece(block, first, lo, end - head))
            else:
                rests.append(len(short))
                short.append((block, first, UNIT // 2, lo, end - head))
    blocks = tuple(block for block, *_ in short)
    pieces = native.Pieces([span.n for span in layout.spans], np.array(short, np.int64)) if short else None
    return BlockPieces(pieces, blocks, tuple(rests), tuple(long))


def release_short_(
    parts: Sequence[Tensor], pieces: BlockPieces, keys: Sequence[bytes], std: float, divisor: float, *, wide: bool
) -> None:
    """Turn the short pieces x of `parts`, of one dtype and device, into (x + std * noise) / divisor.

    The noise of a piece is the scaled sum of normals of its successive `keys`, float64 if `wide`.
    """
    if pieces.short is None:
        return
    if parts[0].is_cpu:
        native.release_pieces_(parts, pieces.short, keys, std, divisor, wide=wide)
        return
    # Short pieces of a device with the CPU's noise.
    rows = pieces.short.rows
    spans = [(block, first, end - lo) for block, first, _, lo, end in rows.tolist()]
    elements = [parts[block].detach().view(-1)[first : first + n] for block, first, n in spans]
    sizes = [n for _, _, n in spans]
    joined = torch.cat(elements)
    host, rows = joined.cpu(), rows.copy()
    rows[:, 0], rows[:, 1] = np.arange(len(rows)), 0
    native.release_pieces_(host.split(sizes), native.Pieces(sizes, rows), keys, std, divisor, wide=wide)
    torch._foreach_copy_(elements, joined.copy_(host).split(sizes))


def keys_of_pieces(keys: Sequence[bytes], pieces: BlockPieces) -> list[bytes]:
    """Return the key of each short piece, from those of the blocks."""
    own = [keys[block] for block in pieces.blocks]
    for i, key in zip(pieces.rests, rests_of([own[i] for i in pieces.rests]), strict=True):
        own[i] = key
    return own


def rests_of(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of the rests of blocks, from those of the blocks."""
    return derive_each(keys, "rest")
