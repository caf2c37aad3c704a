"""Items that a data set repeats. Each repetition is a sample of its own, so epsilon does not hold for the item."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from dpshard.sampling.units import KeyedUnits


def warn_of_repeats(dataset: Any) -> None:
    """Warn if a Subset or ConcatDataset repeats an item of a data set. Takes O(N) time, and reads no item."""
    while isinstance(dataset, KeyedUnits) and not dataset.grouping:
        dataset = dataset.dataset  # unit i is item i
    if type(dataset) not in (Subset, ConcatDataset) and chosen_of_table(dataset) is None:
        return
    try:
        most = int(np.bincount(_items(dataset, {})).max(initial=0))
    except (TypeError, ValueError, IndexError):
        return  # keys that are no numbers, or a data set without a length
    if most > 1:
        warnings.warn(
            f"The data set has an item up to {most} times. Each repetition is drawn and clipped as a sample of its "
            f"own, so epsilon holds for one repetition. For the item itself it is about {most} times as large. To "
            f"weight rare classes, weight the losses of rows. Or make all repetitions one unit: "
            f"UnitDataset(dataset, item_ids, rows_per_unit={most}).",
            stacklevel=4,
        )


def _items(dataset: Any, starts: dict[int, tuple[int, int]]) -> NDArray[np.int64]:
    """Return a number for each item [N], equal for the same item of the same data set.

    `starts` holds the first number, and the length, of each underlying data set.
    """
    if type(dataset) is ConcatDataset:
        return np.concatenate([_items(part, starts) for part in dataset.datasets])
    if type(dataset) is Subset:
        return _items(dataset.dataset, starts)[np.asarray(dataset.indices, dtype=np.int64)]
    if (column := chosen_of_table(dataset)) is not None:
        chosen = column.to_numpy()
        start, _ = starts.setdefault(id(dataset), (sum(n for _, n in starts.values()), int(chosen.max(initial=0)) + 1))
        return start + chosen.astype(np.int64)
    start, size = starts.setdefault(id(dataset), (sum(n for _, n in starts.values()), len(dataset)))
    return np.arange(start, start + size)


def chosen_of_table(dataset: Any) -> Any:
    """Return the row numbers that a data set of Hugging Face chose, a column of pyarrow; else None."""
    if type(dataset).__module__ == "datasets.arrow_dataset" and dataset._indices is not None:
        return dataset._indices.column(0)
    return None
