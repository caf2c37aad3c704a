"""Slices: how the ranks of one model divide the sums of their terms.

[Note: A reduction in two levels] A reduce-scatter over a model's ranks sums terms, and leaves each rank a slice.
Squares of slices add up, and the data ranks sum only slices. Take n elements, C ranks of a model and D data ranks. A
rank sends n (1 - 1/C) + n/C (1 - 1/D) = n (1 - 1/CD) elements, as in one reduce-scatter over all. FSDP may shard over
all ranks, or over the data ranks, whose shards the model's ranks then gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dpshard.backends.collectives import reduce_scatter


class Slices:
    """Slices over the C ranks of `group`, in an order that a reduction over D data ranks keeps.

    FSDP makes `chunks` of a parameter, of `rows(name)` rows each; by default, one. `step`: distance between the
    chunks of one model's ranks; None if they divide each chunk.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        chunks: int = 1,
        rows: Callable[[str], int] | None = None,
        step: int | None = None,
    ) -> None:
        self._group, self._ranks, self._chunks, self._rows = group, group.size(), chunks, rows
        self._divided = self._ranks if step is None else 1
        step = step or 1
        data_ranks = chunks * self._divided // self._ranks
        self._pieces = data_ranks // step, self._ranks, step
        """Pieces in the order of chunks; data rank d is (d // step, d % step)."""

    def width(self, name: str, shape: Sequence[int]) -> int:
        """Elements of a slice for one data rank."""
        return -(-self._chunk(name, shape) // self._divided)

    def _chunk(self, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) if self._rows is None else self._rows(name) * math.prod(shape[1:])

    def scatter(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, data ranks * width] of summed terms [B, *shape]."""
        batch, shape = len(terms_B), terms_B.shape[1:]
        n, width = self._chunk(name, shape), self.width(name, shape)
        chunks_B = _padded(terms_B.reshape(batch, -1), self._chunks * n).view(batch, self._chunks, n)
        pieces_B = _padded(chunks_B, self._divided * width).view(batch, *self._pieces, width)
        sent_CB = pieces_B.permute(2, 0, 1, 3, 4).contiguous()
        own_B = sent_CB.new_empty(batch, sent_CB[0, 0].numel())
        reduce_scatter(own_B.view(-1), sent_CB.view(-1), group=self._group)
        return own_B

    def whole(self, name: str, own: Tensor, shape: Sequence[int]) -> Tensor:
        """Tensor [*shape] from the ranks' slices."""
        outer, _, step = self._pieces
        pieces = self._gathered(own).view(self._ranks, outer, step, -1).transpose(0, 1)
        chunks = pieces.reshape(self._chunks, -1)[:, : self._chunk(name, shape)]
        return chunks.reshape(-1)[: math.prod(shape)].view(tuple(shape))

    def joined(self, own: Tensor) -> Tensor:
        """Slices [ranks, n] of this rank's chunk, from its own [n]."""
        return own[None] if self._divided == 1 else self._gathered(own)

    def _gathered(self, own: Tensor) -> Tensor:
        rows = own.new_empty(self._ranks, own.numel())
        dist.all_gather_into_tensor(rows.view(-1), own.contiguous().view(-1), group=self._group)
        return rows


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def crossing(mesh_ranks: Sequence[int], model_ranks: Sequence[int]) -> list[list[int]] | None:
    """Places by [model rank][data rank]; None unless the model's ranks are evenly spaced."""
    if not set(model_ranks) <= set(mesh_ranks):
        return None
    size, places = len(model_ranks), [mesh_ranks.index(rank) for rank in model_ranks]
    step, data = places[1] - places[0], len(mesh_ranks) // size
    if len(mesh_ranks) % size or step < 1 or data % step or list(mesh_ranks) != sorted(mesh_ranks):
        return None
    found = [[d // step * size * step + c * step + d % step for d in range(data)] for c in range(size)]
    return found if places in [list(column) for column in zip(*found, strict=True)] else None
