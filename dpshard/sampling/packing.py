"""Pack the documents of a micro-batch into rows of one length, whole and one after another.

Rows are filled by the best fit, the longest document first. No gradient depends on the packing, because attention stays
within a unit; `engine.batches` verifies that.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpshard.config import is_count
from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling.packed_tokens import NO_UNIT, PackedTokens
from dpshard.sampling.plans import MicroBatchPlan

IGNORED = -100
"""Label of a position that does not count."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Settings by which `engine.batches(..., packing=)` packs documents into rows [rows, tokens].

    An item of the data set is a document: ids [T_i], or a dict of tensors [T_i] with "input_ids". A micro-batch is a
    dict of "input_ids", "labels", "position_ids" and "unit_ids" [rows, tokens], and the items' other tensors. Positions
    begin at 0 in every document. The label of its first token is -100, so labels may be shifted as in Hugging Face's
    models. Padding has the unit -1.
    """

    rows: int
    """Rows R of a micro-batch; 1 for a flat stream."""
    tokens: int
    """Tokens T of a row. A longer document is cut to its first T tokens."""
    pad_token_id: int = 0
    lengths: Sequence[int] | NDArray[np.int64] | None = None
    """Lengths of all documents; if None, each rank reads all documents of a step twice."""

    def __post_init__(self) -> None:
        if not is_count(self.rows) or not is_count(self.tokens):
            raise ConfigurationError(
                f"Packing: rows={self.rows!r} and tokens={self.tokens!r} must be ints, at least 1."
            )
        if self.rows == self.tokens:
            raise ConfigurationError(
                f"Packing: rows={self.rows} equals tokens, so they cannot be told apart in the model. Choose another "
                f"number of rows."
            )

    def length(self, dataset: Any, index: int) -> int:
        """Return the number of tokens of a document that count, at most T; raise DataError for an empty one."""
        if self.lengths is not None:
            n = int(self.lengths[index])
        else:
            n = len(_fields(dataset[index], index)["input_ids"])
        if n < 1:
            raise DataError(f"Document {index} has no tokens, so it cannot be packed. Leave empty documents out.")
        return min(n, self.tokens)


@dataclass(frozen=True)
class Placement:
    """The places of the units of a micro-batch."""

    packing: Packing
    row: tuple[int, ...]
    start: tuple[int, ...]
    length: tuple[int, ...]
    side_by_side: bool = False


def packer(dataset: Any, packing: Packing | None) -> Callable[..., list[MicroBatchPlan]] | None:
    """Return the function that plans the packed micro-batches of a data set, or None without packing."""
    return None if packing is None else functools.partial(plan_packed, dataset, packing)


def plan_packed(
    dataset: Any,
    packing: Packing,
    indices: Sequence[int] | NDArray[np.int64],
    step: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[MicroBatchPlan]:
    """Return the micro-batches of `rank`, of at most `micro_batch_size` units; all ranks have equally many.

    So each rank packs the units of all ranks.
    """
    drawn = np.asarray(indices, dtype=np.int64)
    lengths = {int(i): packing.length(dataset, int(i)) for i in drawn}
    packed = [_pack(packing, drawn[r::world_size].tolist(), lengths, micro_batch_size) for r in range(world_size)]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    filler = int(drawn[rank % len(drawn)]) if len(drawn) else 0
    plans = []
    for position in range(count):
        everywhere = min(len(p[position][0]) if position < len(p) else 0 for p in packed)
        mine = packed[rank][position] if position < len(packed[rank]) else ([], [], [])
        units, rows, starts = (list(x) for x in mine)
        samples = len(units)
        if not units:  # padding, because a model needs tokens
            units, rows, starts = [filler], [0], [0]
            lengths.setdefault(filler, packing.length(dataset, filler))
        sizes = tuple(lengths[unit] for unit in units)
        indices_B = [*units, *[units[-1]] * (micro_batch_size - len(units))]
        is_padding_B = torch.arange(micro_batch_size, device="cpu") >= samples
        beside = any(any(p[position][2]) for p in packed if position < len(p))
        placement = Placement(replace(packing, lengths=None), tuple(rows), tuple(starts), sizes, beside)
        plans.append(MicroBatchPlan(step, position, count, indices_B, is_padding_B, everywhere, placement=placement))
    return plans


def _pack(
    packing: Packing, units: list[int], lengths: Mapping[int, int], micro_batch_size: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the units of each micro-batch, with their rows and first tokens."""
    most = micro_batch_size // packing.rows
    filled: list[list[tuple[int, int]]] = []  # units and first tokens of each row
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for unit in sorted(units, key=lambda unit: (-lengths[unit], unit)):
        n = lengths[unit]
        fit = bisect.bisect_left(open_rows, (n, -1))
        if fit < len(open_rows):
            free, row = open_rows.pop(fit)
        else:
            free, row = packing.tokens, len(filled)
            filled.append([])
        filled[row].append((unit, packing.tokens - free))
        if free > n and len(filled[row]) < most:
            bisect.insort(open_rows, (free - n, row))
    batches = [filled[i : i + packing.rows] for i in range(0, len(filled), packing.rows)]
    return [
        (
            [unit for row in rows for unit, _ in row],
            [r for r, row in enumerate(rows) for _ in row],
            [start for row in rows for _, start in row],
        )
        for rows in batches
    ]


def require_packing(packing: Any, micro_batch_size: int | None, sample_size: int, plain: Mapping[str, bool]) -> None:
    """Raise ConfigurationError unless `engine.batches` can pack so. `plain`: True for options left at default."""
    if packing is None:
        return
    if not isinstance(packing, Packing):
        raise ConfigurationError(f"packing={packing!r}: pass a dpshard.Packing(rows=..., tokens=...).")
    for option, unchanged in plain.items():
        if not unchanged:
            raise ConfigurationError(
                f"packing= needs the default of {option}: it collates documents itself, one sample each, and only "
                f"verification shows that attention stays within them."
            )
    if micro_batch_size is None or micro_batch_size < packing.rows:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size!r}: with packing it is the largest number of units in a micro-batch, "
            f"a public one, and at least rows={packing.rows}."
        )
    if packing.lengths is not None and len(packing.lengths) != sample_size:
        raise DataError(f"Packing has {len(packing.lengths)} lengths for {sample_size} documents: give one for each.")


class PlacedDocuments(Dataset):
    """Documents, each with the placement of its micro-batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, place: tuple[int, Placement]) -> tuple[dict[str, Tensor], Placement]:
        index, placement = place
        return _fields(self._dataset[index], index), placement


def _fields(item: Any, index: int) -> dict[str, Tensor]:
    """Return the tensors [T_i] of a document by name; a TensorDataset's item is a tuple of one."""
    if isinstance(item, (tuple, list)) and len(item) == 1 and isinstance(item[0], Tensor):
        item = item[0]
    fields = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in fields:
        raise DataError(
            f'Document {index} has no "input_ids", only {list(fields)}: packing needs the ids of its tokens.'
        )
    fields = {name: torch.as_tensor(x) for name, x in fields.items()}
    n = len(fields["input_ids"]) if fields["input_ids"].dim() else -1
    for name, x in fields.items():
        if x.dim() < 1 or len(x) != n:
            raise DataError(
                f"Document {index}: {name} has shape {tuple(x.shape)}, input_ids {tuple(fields['input_ids'].shape)}. "
                f"Packing needs one value per token in every tensor, and no padding."
            )
    return fields


def collate_packed(placed: list[tuple[dict[str, Tensor], Placement]]) -> dict[str, Tensor]:
    """Return the tensors [R, T] of a micro-batch, which Packing lists."""
    documents, placement = [document for document, _ in placed], placed[0][1]
    packing = placement.packing
    R, T = packing.rows, packing.tokens
    names = dict(documents[0])
    out = {name: torch.full((R, T, *x.shape[1:]), _filling(packing, name), dtype=x.dtype) for name, x in names.items()}
    out["labels"] = torch.full((R, T), IGNORED)
    longest = max(placement.length)  # a model may have no embedding for larger positions of padding
    out["position_ids"] = torch.zeros((R, T), dtype=torch.long)
    used = [0] * R
    out["unit_ids"] = torch.full((R, T), NO_UNIT)
    for unit, (document, row, start, n) in enumerate(
        zip(documents, placement.row, placement.start, placement.length, strict=True)
    ):
        if document.keys() != names.keys() or len(document["input_ids"]) < n:
            raise DataError(
                f"A document has {len(document['input_ids'])} tokens of {sorted(document)}, where {n} of "
                f"{sorted(names)} were expected. Give all documents the same fields, and their lengths in order."
            )
        place = (row, slice(start, start + n))
        for name, x in document.items():
            out[name][place] = x[:n]
        if "labels" not in document:
            out["labels"][place] = document["input_ids"][:n]
        out["labels"][row, start] = IGNORED  # no earlier token of the unit predicts it
        out["position_ids"][place] = torch.arange(n)
        out["unit_ids"][place] = unit
        used[row] = max(used[row], start + n)
    for row, end in enumerate(used):
        out["position_ids"][row, end:] = torch.arange(T - end) % longest
    return out


def _filling(packing: Packing, name: str) -> int:
    return packing.pad_token_id if name == "input_ids" else 0


def packed_tokens(data: Any, plan: MicroBatchPlan) -> PackedTokens:
    """Return the units of the tokens of a packed micro-batch."""
    p = plan.placement
    unit_ids = torch.full((p.packing.rows, p.packing.tokens), NO_UNIT, device="cpu")
    for unit, (row, start, n) in enumerate(zip(p.row, p.start, p.length, strict=True)):
        unit_ids[row, start : start + n] = unit
    given = tuple(x for x in data.values() if x.dim() == 2 and not x.is_floating_point())
    return PackedTokens(unit_ids, len(plan.indices), plan.samples, plan.min_samples_per_rank, p.side_by_side, given)
