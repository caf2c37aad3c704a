"""A keyed digest of the clipped sums; their noise is a function of it.

[Note: Equal sums, equal noise] After a crash or a load_state_dict(), a step may be computed again. Noise keyed only by
the step would then cancel in the difference of two unequal releases. So the sums key it, too. Equal sums are the same
release, at no cost. Others get independent noise: a second release, which is counted (accounting/history.py). Noise
does not hide whether two sums are equal.

[Note: A digest of the sums]
The bits of all sums are words w of 32 bits; a flattened parameter lies in rows of WIDTH words. The digest has two lanes
of 64 bits, each

    sum over parameters, rows r and columns c of  row[r] * column[c] * w[r, c]   modulo 2^64

Secret random weights have 32 bits for a column and 64 bits for a row. Sharding and order do not matter.

Two different sums have one digest with probability below 2^-54. In a row where they differ, the difference is d *
column[c] + ..., 0 < |d| < 2^32. At most one weight makes it 0, with probability 2^-32 in a lane. And 2^(31 + t) divides
it with probability 2^-t. Let 2^k be the largest power of 2 that divides all rows' differences. Then the weights of the
rows make the whole 0 with probability 2^(k - 64). Over k, its mean is below 33 * 2^-33. Lanes are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels import native, triton
from dpshard.kernels.native.digest import WIDTH
from dpshard.noise.keyed import SumShard, require_shards
from dpshard.noise.pieces import dense
from dpshard.randomness import RandomSource, derive_key

LANES = 2
BLOCK = 2**8
"""Rows of weights per key."""

_TOGETHER = 2**9
"""Rows that torch digests at once: 32 MiB, at twice 64 bits a word."""


class SumDigest:
    """A keyed digest of sums; see [Note: A digest of the sums]."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        columns = RandomSource(derive_key(secret, "digest", "columns")).words(LANES * WIDTH // 2).view("<i4")
        self._columns = torch.from_numpy(columns.astype(np.int32).reshape(LANES, WIDTH))
        self._columns_at: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        # Parameters repeat every step, and weights are small: 16 bytes for WIDTH words.
        self._weights: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        self._stretches: dict[Any, native.Stretches] = {}
        self._weights_on: dict[tuple[str, int, int, torch.device], Tensor] = {}
        self._rows_on: dict[torch.device, tuple[list[tuple[str, int, int]], Tensor]] = {}  # of the last layout

    def part(self, shards: Sequence[SumShard]) -> Tensor:
        """Return the digest of these shards, int64 [2], on the device of the first; parts add up.

        Raise ConfigurationError for a shard that cannot get noise.
        """
        require_shards(shards)
        filled = [shard for shard in shards if shard.local.numel()]
        total = self._of_whole([shard for shard in filled if not shard.run_length])
        for shard in filled:
            for piece in shard.contiguous() if shard.run_length else ():
                total = self._of_whole([piece]).to(total.device) + total
        return total

    def _of_whole(self, shards: Sequence[SumShard]) -> Tensor:
        """Digest of shards of one run, with at least one element each."""
        devices = dict.fromkeys([shard.local.device for shard in shards])
        found = {device: torch.zeros(LANES, dtype=torch.int64, device=device) for device in devices}
        natively, others = shards, ()
        if not native.supports_digest([shard.local for shard in shards]):
            natively = [shard for shard in shards if native.supports_digest([shard.local])]
            others = [shard for shard in shards if not native.supports_digest([shard.local])]
        if natively:
            self._add_natively_(found[natively[0].local.device], natively)
        rest: dict[torch.device, list[_Stretch]] = {}
        for name, local, start, *_ in others:
            stretch = _stretch(name, start * (local.itemsize // 4), dense(local))
            rest.setdefault(local.device, []).append(stretch)
        for device, stretches in rest.items():
            add_ = self._add_by_kernel_ if triton.supports_digest(device) else self._add_by_torch_
            add_(found[device], stretches)
        whole, *others = found.values() or [torch.zeros(LANES, dtype=torch.int64, device="cpu")]
        for total in others:
            whole = whole + total.to(whole.device)
        return whole

    def _add_natively_(self, total: Tensor, shards: Sequence[SumShard]) -> None:
        """Add the digest of shards that compiled code supports. Their layout is computed once."""
        names, tensors, starts, *_ = zip(*shards, strict=True)
        sizes, itemsizes = tuple(map(Tensor.numel, tensors)), tuple([x.itemsize for x in tensors])
        layout = names, starts, sizes, itemsizes
        stretches = self._stretches.get(layout)
        if stretches is None:
            found = []
            for name, start, n, itemsize in zip(*layout, strict=True):
                at, words = start * (itemsize // 4), n * itemsize // 4
                found.append((words, at % WIDTH, self._of_rows(name, at, words)))
            stretches = self._stretches[layout] = native.Stretches(found)
        native.add_digests_(total, [x if x.is_contiguous() else dense(x) for x in tensors], stretches, self._columns)

    def _add_by_kernel_(self, total: Tensor, stretches: Sequence[_Stretch]) -> None:
        device, layout = total.device, [(name, start, len(words)) for name, start, words, *_ in stretches]
        kept = self._rows_on.get(device)
        if kept is None or kept[0] != layout:
            rows = np.concatenate([self._of_rows(*place) for place in layout])
            kept = self._rows_on[device] = layout, torch.from_numpy(rows).to(device)
        words, at = [stretch.words for stretch in stretches], [stretch.at for stretch in stretches]
        triton.add_digests_(total, words, at, self._columns_on(device, torch.int32), kept[1])

    def _add_by_torch_(self, total: Tensor, stretches: Sequence[_Stretch]) -> None:
        device = total.device
        columns = self._columns_on(device, torch.int64)
        for pieces in _batches(stretches):
            weights = [self._of_rows_on(device, piece.name, piece.start, len(piece.words)) for piece in pieces]
            matrix, rows = _rows_of(pieces).to(torch.int64), torch.cat(weights)
            total += ((matrix[:, None] * columns).sum(2) * rows).sum(0)

    def _columns_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if (device, dtype) not in self._columns_at:
            self._columns_at[device, dtype] = self._columns.to(device, dtype)
        return self._columns_at[device, dtype]

    def _of_rows(self, name: str, start: int, n: int) -> NDArray[np.int64]:
        """Weights [rows, 2] of the rows that words [start, start + n) meet."""
        key = name, start // WIDTH, -(-(start + n) // WIDTH)
        found = self._weights.get(key)
        if found is None:
            _, first, end = key
            blocks = range(first // BLOCK, -(-end // BLOCK))
            keys = [derive_key(self._secret, "digest", name, block) for block in blocks]
            weights = np.concatenate([RandomSource(k).words(LANES * BLOCK).view("<i8") for k in keys])
            rows = weights.reshape(-1, LANES)[first - blocks.start * BLOCK : end - blocks.start * BLOCK]
            found = self._weights[key] = np.ascontiguousarray(rows, np.int64)
        return found

    def _of_rows_on(self, device: torch.device, name: str, start: int, n: int) -> Tensor:
        key = name, start, n, device
        if key not in self._weights_on:
            self._weights_on[key] = torch.from_numpy(self._of_rows(name, start, n)).to(device)
        return self._weights_on[key]


class _Stretch(NamedTuple):
    name: str
    start: int
    words: Tensor
    """[n], int32, at least one."""
    at: int
    rows: int


def _stretch(name: str, start: int, x: Tensor) -> _Stretch:
    """Return all words of `x`; `start` counts words, too."""
    # view(-1) would keep any stride of one element
    words = x.detach().as_strided((x.numel(),), (1,)).view(torch.int32)
    return _placed(name, start, words)


def _placed(name: str, start: int, words: Tensor) -> _Stretch:
    at = start % WIDTH
    return _Stretch(name, start, words, at, -(-(at + len(words)) // WIDTH))


def _pieces(stretch: _Stretch) -> Iterator[_Stretch]:
    """Yield pieces of at most _TOGETHER rows, cut between rows."""
    done, n = 0, len(stretch.words)
    while done < n:
        start = stretch.start + done
        end = min(n, (start // WIDTH + _TOGETHER) * WIDTH - stretch.start)
        yield _placed(stretch.name, start, stretch.words[done:end])
        done = end


def _batches(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    batch: list[_Stretch] = []
    rows = 0
    for piece in (piece for stretch in stretches for piece in _pieces(stretch)):
        if rows + piece.rows > _TOGETHER and batch:
            yield batch
            batch, rows = [], 0
        batch.append(piece)
        rows += piece.rows
    if batch:
        yield batch


def _rows_of(pieces: Sequence[_Stretch]) -> Tensor:
    """Return rows of words [n, WIDTH], with zeros where a row belongs to other stretches."""
    parts: list[Tensor] = []
    for piece in pieces:
        after = piece.rows * WIDTH - piece.at - len(piece.words)
        parts += [piece.words.new_zeros(piece.at), piece.words, piece.words.new_zeros(after)]
    return torch.cat(parts).view(-1, WIDTH)
