"""Runs of a flattened tensor as boxes for torch.distributed.checkpoint.

DeepSpeed cuts parameters even within a row. A run is a few contiguous boxes: the end of a row, whole rows, the
beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(start: int, length: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of elements `start` to `start + length`, in order."""
    if not length:
        return
    if len(shape) <= 1:
        yield ((start,), (length,)) if shape else ((), ())
        return
    row_numel = math.prod(shape[1:])
    while length:
        row, skipped = divmod(start, row_numel)
        if skipped or length < row_numel:
            taken = min(row_numel - skipped, length)
            for offsets, sizes in boxes(skipped, taken, shape[1:]):
                yield (row, *offsets), (1, *sizes)
        else:
            rows = length // row_numel
            taken = rows * row_numel
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start, length = start + taken, length - taken


class Piece(Tensor):
    """Flat `elements` [n] of a tensor of `shape`, from `start` on."""

    elements: Tensor
    start: int

    def __new__(cls, elements: Tensor, start: int, shape: Sequence[int]) -> Piece:
        """Make a view of `elements` [n]."""
        piece = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=elements.dtype, device=elements.device
        )
        piece.elements, piece.start = elements.detach(), start
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Support the new_empty() of an asynchronous save."""
        if func is torch.ops.aten.new_empty.default:
            piece, _ = args
            return cls(piece.elements.new_empty(0, device=(kwargs or {}).get("device")), piece.start, piece.shape)
        raise NotImplementedError(f"{func} of a Piece, which supports only torch.distributed.checkpoint")

    def __repr__(self, **_: Any) -> str:
        return f"Piece({self.start} to {self.start + self.elements.numel()} of {tuple(self.shape)})"

    def _boxes(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        found, begin = [], 0
        for offsets, sizes in boxes(self.start, self.elements.numel(), self.shape):
            end = begin + math.prod(sizes)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            found.append((chunk, self.elements[begin:end].view(sizes)))
            begin = end
        return found

    # --- torch.distributed._checkpointable

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.elements)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk, _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for chunk, box in self._boxes() if chunk.offsets == index.offset)
