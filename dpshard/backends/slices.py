"""Slices: how the ranks of one model divide the sums of their terms.

[Note: A reduction in two levels]
Under context parallelism a sample's gradient is a sum of the ranks' terms, and must be summed before it is squared. A
reduce-scatter over the model's ranks sums it, and leaves each rank a slice, whose squares add up as those of a part do.
The factor scales the slice, and the data ranks sum slices alone. For n elements, C ranks of a model and D data ranks,
the two levels send n (1 - 1/C) + n/C (1 - 1/D) = n (1 - 1/CD) elements from each rank: what one reduce-scatter over all
ranks sends. FSDP may shard over all of them, or over the data ranks, whose shards the model's ranks then gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dpshard.backends.collectives import reduce_scatter


class Slices:
    """Slices of parameters over the C ranks of `group`, in an order that a second reduction over D data ranks keeps.

    FSDP makes `chunks` of a parameter, of `rows(name)` rows each; None: one chunk is the whole. `order`: the chunk of
    [model rank, data rank], if each rank has chunks of its own; None: the ranks of a model divide each chunk.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        chunks: int = 1,
        rows: Callable[[str], int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._group, self._ranks, self._chunks, self._rows = group, group.size(), chunks, rows
        self._divided = 1 if order is not None else self._ranks
        """Pieces of a chunk."""
        self._order = order or [d * self._ranks + c for c in range(self._ranks) for d in range(chunks)]

    def width(self, name: str, shape: Sequence[int]) -> int:
        """Return the elements of a slice for one data rank, of a parameter of real `shape`."""
        return -(-self._chunk(name, shape) // self._divided)

    def _chunk(self, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) if self._rows is None else self._rows(name) * math.prod(shape[1:])

    def scatter(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, data ranks * width] of the sums of all ranks' terms [B, *shape]."""
        batch, shape = len(terms_B), terms_B.shape[1:]
        n, width = self._chunk(name, shape), self.width(name, shape)
        chunks_B = _padded(terms_B.reshape(batch, -1), self._chunks * n).view(batch, self._chunks, n)
        pieces_B = _padded(chunks_B, self._divided * width).view(batch, -1, width)
        sent_CB = pieces_B[:, self._order].view(batch, self._ranks, -1).transpose(0, 1).contiguous()
        own_B = sent_CB.new_empty(sent_CB.shape[1:])
        reduce_scatter(own_B.view(-1), sent_CB.view(-1), group=self._group)
        return own_B

    def whole(self, name: str, own: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the tensor [*shape] of which each rank has a slice."""
        width = self.width(name, shape)
        pieces = own.new_empty(len(self._order), width)
        pieces[self._order] = self._gathered(own).view(-1, width)
        chunks = pieces.view(self._chunks, -1)[:, : self._chunk(name, shape)]
        return chunks.reshape(-1)[: math.prod(shape)].view(tuple(shape))

    def joined(self, own: Tensor) -> Tensor:
        """Return the slices [ranks, n] of this rank's chunk from its own [n], n of any parameters in a row."""
        return own[None] if self._divided == 1 else self._gathered(own)

    def _gathered(self, own: Tensor) -> Tensor:
        rows = own.new_empty(self._ranks, own.numel())
        dist.all_gather_into_tensor(rows.view(-1), own.contiguous().view(-1), group=self._group)
        return rows


def _padded(x: Tensor, size: int) -> Tensor:
    """Return `x` with zeros behind the last dimension, up to `size`."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def crossing(mesh_ranks: Sequence[int], model_ranks: Sequence[int]) -> list[list[int]] | None:
    """Return the places in `mesh_ranks` by [model rank][data rank]; None unless the model's ranks are evenly spaced.

    In a flattened mesh (..., model, ...) they are as far apart as the dimensions behind are large.
    """
    size, places = len(model_ranks), [mesh_ranks.index(rank) for rank in model_ranks]
    step, data = places[1] - places[0], len(mesh_ranks) // size
    if len(mesh_ranks) % size or step < 1 or data % step or list(mesh_ranks) != sorted(mesh_ranks):
        return None
    found = [[d // step * size * step + c * step + d % step for d in range(data)] for c in range(size)]
    return found if places in [list(column) for column in zip(*found, strict=True)] else None
