"""Public facts of columns."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from dpshard.config import is_number
from dpshard.errors import ConfigurationError

Kind = Literal["number", "date", "category", "drop"]

_EPOCH = datetime.date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Column:
    """Public facts."""

    kind: Kind
    """"drop" leaves it out."""
    bounds: tuple[float, float] | None = None
    """None for private ones."""
    names: tuple[str, ...] = ()
    """Others share a bucket. Without names, a public hash sorts cells into buckets."""


def parse_columns(given: Mapping[str, Any]) -> dict[str, Column]:
    """Parse public facts, as in a YAML file; raise ConfigurationError that names the column.

    age: [0, 120]                        bounds of a number
    admitted: [2020-01-01, 2026-01-01]   bounds of a date
    sex: [female, male, other]           names of categories
    ward: {categories: [1, 2, 3]}        the same, for numbers
    diagnosis: category                  a kind alone: number, date, category
    patient: drop
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError("columns: give a mapping from the names of columns to public facts of each.")
    return {str(name): _parse(str(name), facts) for name, facts in given.items()}


def _parse(name: str, facts: Any) -> Column:
    if isinstance(facts, Column):
        return facts
    if isinstance(facts, str) and facts in get_args(Kind):
        return Column(cast(Kind, facts))
    if isinstance(facts, Mapping) and set(facts) == {"categories"} and isinstance(facts["categories"], list | tuple):
        return Column("category", names=_names(name, facts["categories"]))
    if isinstance(facts, list | tuple) and facts:
        if all(isinstance(fact, str) for fact in facts):
            return Column("category", names=_names(name, facts))
        if len(facts) == 2 and all(isinstance(fact, datetime.date) for fact in facts):
            return Column("date", bounds=_bounds(name, *(days(fact) for fact in facts)))
        if len(facts) == 2 and all(is_number(fact) for fact in facts):
            return Column("number", bounds=_bounds(name, *(float(fact) for fact in facts)))
    raise ConfigurationError(
        f"columns: {name}: give bounds [low, high], two dates, names of categories [a, b, ...], "
        f"{{categories: [1, 2, ...]}}, or a kind: {', '.join(get_args(Kind))}."
    )


def days(date: datetime.date) -> float:
    """Return days since 1970."""
    if isinstance(date, datetime.datetime):
        date = date.date()
    return float((date - _EPOCH).days)


def cell_name(cell: Any) -> str:
    """Return a cell as a category: 1, 1.0 and "1" are one."""
    if isinstance(cell, str):
        return cell.strip()
    return str(int(cell)) if is_number(cell) and math.isfinite(cell) and cell == int(cell) else str(cell)


def _names(name: str, categories: Any) -> tuple[str, ...]:
    names = tuple(cell_name(category) for category in categories)
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"columns: {name}: the categories need names, each once.")
    return names


def _bounds(name: str, low: float, high: float) -> tuple[float, float]:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigurationError(f"columns: {name}: the bounds must be finite, and the first below the second.")
    return low, high
