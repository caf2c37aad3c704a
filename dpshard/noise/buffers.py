"""Correlated noise from stored vectors, for strategies C with few bands.

The noise y has C y = z, so y_t = z_t - c_1 y_{t-1} - ... - c_{b-1} y_{t-b+1}. A `_Ring` keeps the last b - 1 vectors y
of the rank's shards. The key of the newest identifies the path to its step; on another path, the ring computes all
steps again. So buffers need not be saved, and the mesh may change.

Buffered noise rounds differently from noise of vectors drawn again. The difference would show the rounding of the
noise, so the two kinds must never share a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpshard.noise.keyed import BLOCK, KeyedGaussian, SumShard


class NoiseBuffers:
    """The rings of a rank for `coefficients` c_0 = 1, ..., c_{b-1}."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._coefficients = tuple(coefficients)
        self._rings: dict[tuple[Any, ...], _Ring] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(ring.vectors.nbytes for ring in self._rings.values())

    def keep(self, links: Sequence[bytes]) -> None:
        """Forget the rings of all steps except for the last two of `links`."""
        self._rings = {key: ring for key, ring in self._rings.items() if ring.link in links[-2:]}

    def of_step(self, shards: Sequence[SumShard], links: Sequence[bytes], *, secure: bool) -> list[Tensor]:
        """Return y [n] of each shard for the last of `links`, the keys of all steps."""
        key = tuple((shard.place, shard.local.shape, shard.local.dtype, shard.local.device) for shard in shards)
        if key not in self._rings:
            self._rings[key] = _Ring(shards, self._coefficients, secure=secure)
        ring = self._rings[key]
        ring.advance(shards, links)
        return ring.last(len(links) - 1)


class _Ring:
    """Vectors y of some shards; that of step s is row s modulo their number."""

    def __init__(self, shards: Sequence[SumShard], coefficients: tuple[float, ...], *, secure: bool) -> None:
        like = shards[0].local
        self._sizes = [shard.local.numel() for shard in shards]
        self._coefficients, self._secure = coefficients, secure
        self.link: bytes | None = None
        self.vectors = torch.zeros(
            max(1, len(coefficients) - 1),
            sum(self._sizes),
            dtype=torch.float64 if secure else like.dtype,
            device=like.device,
        )

    def advance(self, shards: Sequence[SumShard], links: Sequence[bytes]) -> None:
        """Advance to the last step of `links`, from the one before or from the first one."""
        if self.link == links[-1]:
            return
        first = len(links) - 1 if len(links) > 1 and self.link == links[-2] else 0
        self.link = None
        for step in range(first, len(links)):
            for lo, pieces in _pieces(shards):
                self._advance(lo, pieces, step, links[step])
        self.link = links[-1]

    def last(self, step: int) -> list[Tensor]:
        return list(self.vectors[step % len(self.vectors)].split(self._sizes))

    def _advance(self, lo: int, pieces: Sequence[SumShard], step: int, link: bytes) -> None:
        """Replace the oldest vector by that of `step`, in the columns from `lo` on."""
        sizes = [piece.local.numel() for piece in pieces]
        y = self.vectors.new_zeros(sum(sizes))
        parts = zip(pieces, y.split(sizes), strict=True)
        drawn = [piece._replace(local=part.view(piece.local.shape)) for piece, part in parts]
        KeyedGaussian(link, self._secure)._release_(drawn, step, 1.0, 1.0)
        columns = self.vectors[:, lo : lo + len(y)]
        for j, c in enumerate(self._coefficients[1 : step + 1], start=1):
            # Two operations: a fused one would round differently at the ends of vector loads.
            y.sub_(columns[(step - j) % len(columns)] * c)
        columns[step % len(columns)].copy_(y)


@dataclass(frozen=True)
class BufferedGaussian(KeyedGaussian):
    """Noise y of the last of `links`, the keys of all steps."""

    links: tuple[bytes, ...] = field(default=(), repr=False)
    buffers: NoiseBuffers = field(default_factory=lambda: NoiseBuffers((1.0,)), repr=False)

    def _release_(self, shards: Sequence[SumShard], step: int, std: float, divisor: float) -> Tensor:
        if std == 0:
            return super()._release_(shards, step, std, divisor)
        self.buffers.keep(self.links)
        groups: dict[tuple[torch.dtype, torch.device], list[SumShard]] = {}
        for shard in shards:
            if shard.local.numel():
                groups.setdefault((shard.local.dtype, shard.local.device), []).append(shard)
        total = torch.zeros((), dtype=torch.float64, device=shards[0].local.device if shards else "cpu")
        for alike in groups.values():
            norms = torch._foreach_norm([shard.local for shard in alike])
            total += torch.stack(list(norms)).double().square().sum().to(total.device)
            for shard, noise in zip(alike, self.buffers.of_step(alike, self.links, secure=self.secure), strict=True):
                self._add_(shard.local.detach(), noise, std, divisor)
        return total.sqrt()

    def _add_(self, x: Tensor, noise: Tensor, std: float, divisor: float) -> None:
        dense = x.contiguous().view(-1)
        torch.autograd.graph.increment_version(x)  # compiled code does not
        for part, y in zip(dense.split(BLOCK), noise.split(BLOCK), strict=True):
            if self._draws_on_cpu(x.device):
                self._privatize(part, y.cpu().numpy().copy(), std, divisor)
            else:
                part.add_(y * std).div_(divisor)
        if not x.is_contiguous():
            x.copy_(dense.view(x.shape))


def _pieces(shards: Sequence[SumShard]) -> Iterator[tuple[int, list[SumShard]]]:
    """Cut shards between blocks; yield groups of about BLOCK elements, each after its place."""
    group: list[SumShard] = []
    lo = at = 0
    for shard in shards:
        for piece in _cut(shard):
            group.append(piece)
            at += piece.local.numel()
            if at - lo >= BLOCK:
                yield lo, group
                group, lo = [], at
    if group:
        yield lo, group


def _cut(shard: SumShard) -> Iterator[SumShard]:
    """Yield a shard's parts in each block; columns of a matrix stay together."""
    if shard.run_length:
        yield shard
        return
    n, at = shard.local.numel(), 0
    flat = shard.local.detach().new_empty(()).expand(n)  # no memory: only its size counts
    while at < n:
        size = min(n - at, BLOCK - (shard.start + at) % BLOCK)
        yield SumShard(shard.name, flat[at : at + size], shard.start + at)
        at += size
