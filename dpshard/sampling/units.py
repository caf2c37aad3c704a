"""Units of several rows: reading and collating them.

[Note: Units of unequal size]
A micro-batch has K rows of every unit, so shapes do not depend on the draw. A unit with n < K rows is filled with
copies of its last row. Its real rows have weight K / n, copies 0, rows of other units 1. So the mean of weight times
loss is the mean over real rows. From more than K rows, the run's key draws K in every step. Neither changes epsilon,
because each unit is clipped as one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpshard.config import require_rows_per_unit
from dpshard.errors import DataError
from dpshard.randomness import SECRET_BYTES, RandomSource, derive_key, host_states, restore_host

WEIGHT = "row_weight"
"""Key of the weight in a row that is a dict."""


@dataclass(frozen=True)
class UnitRows:
    """The K rows of a unit with their weights. Not a sequence, because torch's collate function would transpose it."""

    rows: list[Any]


class KeyedUnits(Dataset):
    """Units of `rows_per_unit` rows, which a key draws again in every step."""

    rows_per_unit: int
    dataset: Any
    """Data set from which their rows are read."""

    @property
    def grouping(self) -> bytes | memoryview:
        """Rows of `dataset` in each unit; empty if unit i is item i."""
        return b""

    def draw(self, index: int, key: bytes) -> UnitRows:
        """Return the rows of unit `index` that `key` draws; they depend on that unit only."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> UnitRows:
        """Return the rows of unit `index`, always the same ones."""
        return self.draw(index, bytes(SECRET_BYTES))


class UnitDataset(KeyedUnits):
    """A data set of units (users, patients, documents): item i is unit i, of `rows_per_unit` rows.

    A row (x, y) becomes (x, y, weight), a dict gets the key "row_weight", any other row x becomes (x, weight). Multiply
    the losses of rows by their weights: see [Note: Units of unequal size].

    Args:
        dataset: A map-style data set of rows.
        unit_ids: The unit of every row: numbers or strings.
        rows_per_unit: Rows K of a unit in a step; equal to the engine's.

    Raises:
        DataError: if there are no rows, the number of ids differs, or an id is missing.
        ConfigurationError: if rows_per_unit is not a positive int.
    """

    def __init__(self, dataset: Any, unit_ids: Sequence[Any] | NDArray[Any] | Tensor, rows_per_unit: int) -> None:
        require_rows_per_unit(rows_per_unit)
        self.dataset, self.rows_per_unit = dataset, rows_per_unit
        ids = _ids_of_rows(unit_ids, len(dataset))
        self.ids, unit_of_row, counts = np.unique(ids, return_inverse=True, return_counts=True)
        """The id of each unit, sorted; numbers in order of appearance for ids of several types."""
        self._rows = np.argsort(unit_of_row, kind="stable")  # of unit 0, of unit 1, ...
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        """Return the number of units: `sample_size` of the engine."""
        return len(self.ids)

    @property
    def grouping(self) -> memoryview:
        """Return the rows of unit 0, of unit 1, ..., and where each ends."""
        return np.concatenate([self._rows, self._ends]).astype("<i8", copy=False).data

    def draw(self, index: int, key: bytes) -> UnitRows:
        """Return the rows of a unit. If it has more than K rows, `key` draws K of them."""
        if not 0 <= index < len(self):
            raise IndexError(f"unit {index} of {len(self)}")
        K, end = self.rows_per_unit, int(self._ends[index])
        begin = int(self._ends[index - 1]) if index else 0
        n = end - begin
        if n > K:
            words = RandomSource(derive_key(key, "unit", index)).words(4)
            places = np.random.default_rng([int(word) for word in words]).choice(n, K, replace=False, shuffle=False)
        else:
            places = np.arange(K).clip(max=n - 1)
        weights = [K / min(n, K) if place < n else 0.0 for place in range(K)]
        rows = self._rows[begin + places].tolist()
        return UnitRows([_weighted(self.dataset[row], weight) for row, weight in zip(rows, weights, strict=True)])


def _ids_of_rows(unit_ids: Any, rows: int) -> NDArray[Any]:
    ids = np.asarray(unit_ids.cpu() if isinstance(unit_ids, Tensor) else unit_ids)
    if rows == 0:
        raise DataError("The data set of rows is empty: check the path or the filter that it was made with.")
    if ids.shape != (rows,):
        raise DataError(
            f"unit_ids has shape {ids.shape}, and the data set {rows} rows: pass one id for each row, in their order."
        )
    missing = np.isnan(ids) if ids.dtype.kind == "f" else np.array([x is None or x != x for x in ids.tolist()])
    if missing.any():
        raise DataError(
            f"Row {int(missing.argmax())} has no unit id ({int(missing.sum())} rows have none), so its unit is "
            f"unknown. Leave such rows out, or give each an id."
        )
    if ids.dtype.kind == "O":  # 1 and "1" are two units; 1, 1.0 and np.int64(1) are one
        numbers: dict[Any, int] = {}
        try:
            ids = np.array([numbers.setdefault(x, len(numbers)) for x in ids.tolist()])
        except TypeError as error:
            raise DataError(f"A unit id cannot be compared ({error}). Take numbers or strings.") from error
    return ids


def _weighted(row: Any, weight: float) -> Any:
    w = torch.tensor(weight)
    if isinstance(row, Mapping):
        return {**row, WEIGHT: w}
    if isinstance(row, (tuple, list)):
        return (*row, w)
    return (row, w)


def augment(dataset: Any, transform: Callable[[Any], Any], rows_per_unit: int) -> KeyedUnits:
    """Return a data set of units: unit i is `transform(dataset[i])`, `rows_per_unit` times.

    This is augmentation multiplicity (De et al. 2022, arXiv:2204.13650). The engine clips the mean gradient of a
    sample's augmentations, so they cost no epsilon. `transform` keeps the shapes of its item, and must read nothing
    else: no mixup. The run's key seeds the global generators of torch, NumPy and Python. Raises ConfigurationError if
    rows_per_unit is not a positive int.
    """
    require_rows_per_unit(rows_per_unit)
    return _Augmented(dataset, transform, rows_per_unit)


class _Augmented(KeyedUnits):
    def __init__(self, dataset: Any, transform: Callable[[Any], Any], rows_per_unit: int) -> None:
        self.dataset, self._transform, self.rows_per_unit = dataset, transform, rows_per_unit

    def __len__(self) -> int:
        return len(self.dataset)

    def draw(self, index: int, key: bytes) -> UnitRows:
        item, rows = self.dataset[index], []
        for row in range(self.rows_per_unit):
            with _seeded(derive_key(key, "augmentation", index, row)):
                rows.append(self._transform(copy.deepcopy(item)))
        return UnitRows(rows)


@contextmanager
def _seeded(key: bytes) -> Iterator[None]:
    """Seed the global generators on the CPU within the block."""
    words = [int(word) for word in RandomSource(key).words(3)]
    states = host_states()
    torch.default_generator.manual_seed(words[0] >> 1)
    np.random.seed(words[1] % 2**32)  # noqa: NPY002
    random.seed(words[2])
    try:
        yield
    finally:
        restore_host(states)


class DrawnUnits(Dataset):
    """Units indexed by (unit, key of the step)."""

    def __init__(self, dataset: KeyedUnits) -> None:
        self._dataset = dataset

    def __getitem__(self, drawn: tuple[int, bytes]) -> UnitRows:
        return self._dataset.draw(*drawn)


@dataclass(frozen=True)
class CollatedRows:
    """Passes the rows of units to a `collate_fn` of rows."""

    collate_fn: Callable[[list[Any]], Any]
    rows_per_unit: int

    def __call__(self, units: list[Any]) -> Any:
        """Collate the rows; raise DataError for a unit without exactly K rows."""
        return self.collate_fn([row for unit in units for row in rows_of(unit, self.rows_per_unit)])


def rows_of(unit: Any, rows_per_unit: int) -> list[Any]:
    """Return the K rows of an item: of its tensors, arrays, and lists of numbers or strings."""
    if isinstance(unit, UnitRows):
        if len(unit.rows) != rows_per_unit:
            raise DataError(
                f"The data set has units of up to {len(unit.rows)} rows, and the engine rows_per_unit={rows_per_unit}: "
                f"give both the same rows_per_unit."
            )
        return unit.rows
    return [_row(unit, j, rows_per_unit) for j in range(rows_per_unit)]


def _row(x: Any, j: int, rows_per_unit: int) -> Any:
    if isinstance(x, Mapping):
        return {key: _row(value, j, rows_per_unit) for key, value in x.items()}
    if isinstance(x, tuple) or (isinstance(x, list) and not are_plain(x)):
        rows = [_row(part, j, rows_per_unit) for part in x]
        return type(x)(*rows) if hasattr(x, "_fields") else type(x)(rows)
    array = isinstance(x, (Tensor, np.ndarray))
    if not isinstance(x, (Tensor, np.ndarray, list)) or (array and x.ndim == 0) or len(x) != rows_per_unit:
        raise not_units(_described(x), rows_per_unit)
    return x[j]


def are_plain(x: Sequence[Any]) -> bool:
    """Return True if all items are strings or numbers, and there are any."""
    return bool(x) and all(isinstance(item, (str, bytes, int, float)) for item in x)


def _described(x: Any) -> str:
    if isinstance(x, (Tensor, np.ndarray)):
        return f"a tensor of shape {tuple(x.shape)}"
    return f"a {type(x).__name__} of {len(x)} values" if isinstance(x, list) else f"a {type(x).__name__}"


def not_units(found: str, rows_per_unit: int) -> DataError:
    """Return the error for an item without K rows."""
    return DataError(
        f"An item of the data set holds {found}, which is not a unit of rows_per_unit={rows_per_unit} rows. Every "
        f"tensor of an item needs its rows first, [{rows_per_unit}, ...]. dpshard.UnitDataset(dataset, unit_ids, "
        f"rows_per_unit={rows_per_unit}) makes units of single rows, and fills those that have fewer."
    )


class UnitTensors(Dataset):
    """A TensorDataset of units [N, K, ...], read as rows."""

    def __init__(self, dataset: TensorDataset, rows_per_unit: int):
        self.tensors = dataset.tensors
        for x in self.tensors:
            if x.dim() < 2 or x.shape[1] != rows_per_unit:
                raise not_units(_described(x[0]), rows_per_unit)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        units = torch.tensor(indices)
        return [x[units.to(x.device)].flatten(0, 1) for x in self.tensors]
