"""Rows of a table as numbers for a network.

It keeps names and kinds of columns, and private bounds. A kind that nobody gave is that of most cells, and counts as
public. Cells that do not fit are missing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.accounting.releases import Counts
from dpshard.applications.extras import require
from dpshard.applications.tabular.columns import Column, Kind, cell_name
from dpshard.applications.tabular.statistics import balanced, private_statistics
from dpshard.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pandas import DataFrame

BUCKETS = 16


@dataclass(frozen=True)
class Encoder:
    """Columns with public facts or private bounds."""

    columns: dict[str, Column]
    """In the order of the table, without dropped ones."""

    @classmethod
    def of(cls, frame: DataFrame, given: Mapping[str, Column]) -> Encoder:
        """Return an encoder of the columns of `frame`; kinds that are not `given` are those of most cells.

        Raises DataError for a column that the table lacks, or a table without any.
        """
        own = [str(name) for name in frame.columns]
        if unknown := [name for name in given if name not in own]:
            raise DataError(f"The table has no column {', '.join(map(repr, unknown))}, but {listed(frame)}.")
        if len(set(own)) < len(own):
            raise DataError("Two columns of the table have one name: rename one.")
        facts = {n: given[n] if n in given else Column(_kind(frame.iloc[:, i])) for i, n in enumerate(own)}
        for name, column in facts.items():
            if name not in given and column.kind == "category" and _is_foreign(frame[name]):
                raise DataError(
                    f"Most cells of column {name!r} look like numbers or days of another format. Write 3.5 for 3,5, "
                    f"and 2026-01-31 for a day, or say {name}: category in columns."
                )
        for name, column in given.items():
            if column.kind in ("number", "date") and _fits_nowhere(frame[name], column.kind):
                raise DataError(
                    f"Column {name!r} is of kind {column.kind}, but no cell is one. Is another format meant, such as a "
                    f"decimal comma or a day that is not written as 2026-01-31?"
                )
        found = {name: column for name, column in facts.items() if column.kind != "drop"}
        if not found:
            raise DataError("The table has no column to learn from: all are dropped, or hold the label.")
        return cls(found)

    @property
    def unbounded(self) -> list[str]:
        """Numbers and dates without bounds."""
        return [n for n, column in self.columns.items() if column.kind in ("number", "date") and column.bounds is None]

    def unbounded_cells(self, frame: DataFrame) -> NDArray[np.float64]:
        """Return [N, D], NaN if missing."""
        cells = [_numbers(frame[name], self.columns[name].kind) for name in self.unbounded]
        return np.stack(cells, axis=1) if cells else np.empty((len(frame), 0))

    def bounded(self, bounds_D2: NDArray[np.float64]) -> Encoder:
        """Return this encoder with private bounds."""
        found = dict(zip(self.unbounded, bounds_D2.tolist(), strict=True))
        return Encoder({n: replace(c, bounds=tuple(found[n])) if n in found else c for n, c in self.columns.items()})

    def scaled(self, scale: float) -> Encoder:
        """Return this encoder with bounds -scale and scale of unbounded numbers."""
        ours = {n for n in self.unbounded if self.columns[n].kind == "number"}
        return Encoder({n: replace(c, bounds=(-scale, scale)) if n in ours else c for n, c in self.columns.items()})

    @property
    def numbers(self) -> int:
        """Leading features that are in [-1, 1]."""
        return sum(column.kind != "category" for column in self.columns.values())

    def encode(self, frame: DataFrame) -> Tensor:
        """Return float32 features [N, F]: numbers in [-1, 1] (0 if missing), who is missing, then categories.

        Raises DataError for a missing column, ConfigurationError for one without bounds.
        """
        if missing := [name for name in self.columns if name not in frame.columns]:
            raise DataError(f"The table has no column {', '.join(map(repr, missing))}.")
        if self.unbounded:
            raise ConfigurationError(f"Columns without bounds: {', '.join(self.unbounded)}.")
        scaled, absent, others = [], [], []
        for name, column in self.columns.items():
            if column.bounds is None:
                others.append(_one_hot(frame[name], column))
                continue
            low, high = column.bounds
            cells_N = _numbers(frame[name], column.kind)
            absent.append(np.isnan(cells_N))
            with np.errstate(over="ignore"):
                scaled.append(np.nan_to_num((2 * (cells_N - low) / (high - low) - 1).clip(-1, 1), nan=0.0))
        features = [np.stack(part, axis=1) for part in (scaled, absent) if part] + others
        return torch.from_numpy(np.concatenate(features, axis=1, dtype=np.float32))


class Fit(NamedTuple):
    """What private statistics say about a table."""

    encoder: Encoder
    target: tuple[float, float] | None = None
    """Bounds of a target that is a number."""
    earlier: Counts = ()
    weights: tuple[float, ...] | None = None
    """Of classes, by private counts."""


def fit_privately(
    encoder: Encoder,
    frame: DataFrame,
    noise: Callable[[], float],
    *,
    target_N: Any = None,
    labels: Any = None,
    **facts: Any,
) -> Fit:
    """Return `encoder` with bounds for all columns; `noise` is asked if they cost something.

    `target_N` has no public bounds, `labels` [N] are counted. `private_statistics` defines the `facts`.
    """
    cells_ND = encoder.unbounded_cells(frame)
    if target_N is not None:
        cells_ND = np.concatenate([cells_ND, target_N[:, None]], axis=1)
    if len(cells_ND) == 0 or (cells_ND.shape[1] == 0 and labels is None):
        return Fit(encoder)
    sigma = noise()
    found = private_statistics(cells_ND, sigma, labels=labels, **facts)
    target = None if target_N is None else tuple(found.bounds[-1].tolist())
    weights = None if found.counts is None else balanced(found.counts, sigma)
    return Fit(encoder.bounded(found.bounds[: len(encoder.unbounded)]), target, found.earlier, weights)


def listed(frame: DataFrame) -> str:
    """Return names of columns for an error, unless they look like cells."""
    names = [str(name) for name in frame.columns]
    parts = [part for name in names for part in re.split(r"[;|\t]", name)]
    series = _pandas().Series(parts, dtype=object)
    values = np.isfinite(_numbers(series, "number")) | np.isfinite(_numbers(series, "date"))
    if values.any() or any((frame.iloc[:, i].astype(str) == name).any() for i, name in enumerate(names)):
        return "names that look like cells of a row (does the first line name the columns?)"
    return ", ".join(map(repr, names))


def numbers_of(cells: Any) -> NDArray[np.float64]:
    """Return numbers, NaN for other cells."""
    return _numbers(cells, "number")


def _pandas() -> Any:
    require("pandas", "train", "a table")
    import pandas

    return pandas


def _kind(cells: Any) -> Kind:
    types = _pandas().api.types
    if types.is_bool_dtype(cells) or types.is_numeric_dtype(cells):
        return "number"
    if types.is_datetime64_any_dtype(cells):
        return "date"
    for kind in ("number", "date"):
        if 2 * np.isfinite(_numbers(cells, kind)).sum() > _present(cells).sum():
            return kind
    return "category"


def _fits_nowhere(cells: Any, kind: Kind) -> bool:
    return bool(_present(cells).any()) and not np.isfinite(_numbers(cells, kind)).any()


def _is_foreign(cells: Any) -> bool:
    found = cells.astype(str).str.strip().str.fullmatch(r"[+-]?\d+,\d+|\d{1,2}[./]\d{1,2}[./]\d{2,4}")
    return 2 * int(found.sum()) > _present(cells).sum()


def _present(cells: Any) -> NDArray[np.bool_]:
    return (cells.notna() & (cells.astype(str).str.strip() != "")).to_numpy(dtype=bool)


def _numbers(cells: Any, kind: Kind) -> NDArray[np.float64]:
    pandas = _pandas()
    if kind == "number":
        numeric = pandas.to_numeric(cells, errors="coerce")
        return numeric.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    if not pandas.api.types.is_datetime64_any_dtype(cells):
        texts = cells.astype("string").str.strip()  # a number is no date
        cells = pandas.to_datetime(texts, format="ISO8601", errors="coerce", utc=True)
    if cells.dt.tz is not None:
        cells = cells.dt.tz_convert("UTC").dt.tz_localize(None)
    moments = cells.to_numpy(dtype="datetime64[us]")  # nanoseconds would end in 2262
    return np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / 86_400e6)


def _one_hot(cells: Any, column: Column) -> NDArray[np.float32]:
    """Return [N, K]; column 0 is for missing cells."""
    present = _present(cells)
    names = [cell_name(cell) for cell in cells.astype(object)]
    if column.names:
        number = {name: index for index, name in enumerate(column.names, start=2)}
        chosen, width = [number.get(name, 1) for name in names], 2 + len(column.names)
    else:
        chosen, width = [1 + zlib.crc32(name.encode()) % BUCKETS for name in names], 1 + BUCKETS
    found = np.zeros((len(names), width), np.float32)
    found[np.arange(len(names)), np.where(present, chosen, 0)] = 1
    return found
