"""A keyed digest of the clipped sums; their noise is a function of it.

[Note: Equal sums, equal noise] After a crash or a load_state_dict(), a step may be computed again. Noise keyed only by
the step would then cancel in the difference of two unequal releases. So the sums key it, too. Equal sums are the same
release, at no cost; others get independent noise, and are counted (accounting/history.py). Noise does not hide whether
two sums are equal.

[Note: A digest of the sums]
The bits of all sums are words w of 32 bits; a flattened parameter lies in rows of WIDTH words. The digest has two lanes
of 64 bits, each

    sum over parameters, rows r and columns c of  row[r] * column[c] * w[r, c]   modulo 2^64

Secret random weights have 32 bits for a column and 64 bits for a row. Sharding and order do not matter. Two different
sums have one digest with probability below 2^-54; docs/accounting.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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
        self._kept_rows: dict[torch.device, tuple[list[tuple[str, int, int]], Tensor]] = {}  # of the last layout

    def part(self, shards: Sequence[SumShard]) -> Tensor:
        """Return the digest of these shards, int64 [2], on the device of the first; parts add up.

        Raise ConfigurationError for a shard that cannot get noise.
        """
        require_shards(shards)
        filled = [shard for shard in shards if shard.local.numel()]
        total = self._of_whole([shard for shard in filled if not shard.run_length])
        for shard in filled:
            for piece in shard.contiguous() if shard.run_length else ():
                own = self._of_whole([piece])
                total = own + total.to(own.device)
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
        rest: dict[torch.device, list[tuple[str, int, Tensor]]] = {}
        for name, local, start, *_ in others:
            # view(-1) would keep any stride of one element
            words = dense(local).detach().as_strided((local.numel(),), (1,)).view(torch.int32)
            rest.setdefault(local.device, []).append((name, start * (local.itemsize // 4), words))
        for device, stretches in rest.items():
            names, starts, words = zip(*stretches, strict=True)
            by_kernel = triton.supports_digest(device)
            add_, dtype = (triton.add_digests_, torch.int32) if by_kernel else (_add_digests_, torch.int64)
            rows = self._rows_on(device, [*zip(names, starts, map(len, words), strict=True)])
            add_(found[device], words, [start % WIDTH for start in starts], self._columns_on(device, dtype), rows)
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

    def _rows_on(self, device: torch.device, layout: list[tuple[str, int, int]]) -> Tensor:
        """Return the weights of rows of all stretches (name, start, number of words), one after another."""
        kept = self._kept_rows.get(device)
        if kept is None or kept[0] != layout:
            rows = np.concatenate([self._of_rows(*place) for place in layout])
            kept = self._kept_rows[device] = layout, torch.from_numpy(rows).to(device)
        return kept[1]


def _add_digests_(total: Tensor, words: Sequence[Tensor], at: Sequence[int], columns: Tensor, rows: Tensor) -> None:
    """Do what triton.add_digests_ does, with int64 `columns`."""
    for x, place in zip(words, at, strict=True):
        n = -(-(place + len(x)) // WIDTH)
        own, rows = rows[:n], rows[n:]
        for first in range(0, n, _TOGETHER):
            lo, end = (max(0, row * WIDTH - place) for row in (first, first + _TOGETHER))
            part, before = x[lo:end], max(0, place - first * WIDTH)
            padded = F.pad(part, (before, -(before + len(part)) % WIDTH)).view(-1, WIDTH).to(torch.int64)
            total += ((padded[:, None] * columns).sum(2) * own[first : first + _TOGETHER]).sum(0)
