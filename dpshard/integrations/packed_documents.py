"""Packed rows for Trainers.

A Trainer's own packing makes rows of several samples before sampling, and a row would be clipped as one sample. Here
the collator gets one document at a time, and engine.batches packs the documents that it draws.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling import Packing


def packing_of(args: Any, packing: Packing | None, collator: Any) -> Packing | None:
    """Return the given packing, or that of SFTConfig; ConfigurationError without the length of a row."""
    if packing is not None:
        return packing
    asked = [name for name in ("packing", "padding_free") if getattr(args, name, False)]
    flattens = type(collator).__name__ == "DataCollatorWithFlattening" or getattr(collator, "padding_free", False)
    if not asked and not flattens:
        return None
    if asked and args.max_length is not None:
        return Packing(rows=1, tokens=args.max_length)
    what = f"{asked[0]}=True" if asked else f"{type(collator).__name__} puts several samples into one row, which"
    raise ConfigurationError(
        f"{what} needs the length of a row: pass packing=dpshard.Packing(rows=1, tokens=...) to the Trainer"
        f"{', or set max_length' if asked else ''}. It packs the documents that are drawn, and clips each separately."
    )


def refuse_packed(dataset: Any) -> None:
    """Raise ConfigurationError if TRL has packed the rows: a document may be in several."""
    if "seq_lengths" in (getattr(dataset, "column_names", None) or ()):
        raise ConfigurationError(
            "The data set has the column seq_lengths, so its rows were packed from documents: a document in several "
            "rows would count as several samples. Pass the documents, and packing=True: the engine packs those that it "
            "draws."
        )


class CollatedDocuments(Dataset):
    """Documents, each collated alone: ids [T_i], and all other tensors with T_i values."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a document without padding. Raises DataError without ids [1, T]."""
        row = self._collate_fn([self._dataset[index]])
        ids = row.get("input_ids") if hasattr(row, "get") else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise DataError(
                f"The collator made no input_ids [1, T] from document {index}, so it cannot be packed. Let it "
                f"return a dict with input_ids, of one row for each sample."
            )
        real = row.get("attention_mask", ids.new_ones(ids.shape)).bool()[0]
        per_token = {name: x[0] for name, x in row.items() if isinstance(x, Tensor) and x.shape[:2] == ids.shape}
        # Packing makes positions, and models of Transformers read documents only where there is no mask.
        return {name: x[real] for name, x in per_token.items() if name not in ("attention_mask", "position_ids")}
