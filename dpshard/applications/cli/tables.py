"""Tables as the data of a run.

[Note: Bounds of a run]
Private bounds are a release. So the first process draws them once, from the training rows. Other processes and resumed
runs read them in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpshard.accounting import Release
from dpshard.accounting.releases import Counts
from dpshard.applications.cli.data import Data, Kind, parts, splits, tokens, unlabelled
from dpshard.applications.cli.formats import BALANCED, parse_weights, read_yaml
from dpshard.applications.cli.run_folder import intact
from dpshard.applications.cli.settings import LABEL_COLUMN, TEXT_COLUMN, TrainSettings
from dpshard.applications.tabular import Classes, Column, Encoder, Numbers, fit_privately, noise_for, parse_columns
from dpshard.applications.tabular.columns import cell_name
from dpshard.applications.tabular.encoding import listed, numbers_of
from dpshard.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Fitted:
    """Facts about the columns of a run's table, and their cost."""

    encoder: Encoder
    target: Column | None
    """Facts of the label: bounds, or classes in the order of the outputs."""
    earlier: Counts
    weights: tuple[float, ...] | None = None
    """Weights of the classes, by private counts."""

    def plain(self) -> dict[str, Any]:
        """Return the content as plain JSON."""
        facts = asdict(self)
        return facts.pop("encoder") | facts

    @classmethod
    def read(cls, path: Path) -> Fitted:
        """Return the content of a file with a `plain()`."""
        with intact(path, "restore it from a copy: other bounds would be a second release"):
            if not path.is_file():
                raise ValueError("there is no such file")
            plain = json.loads(path.read_text("utf-8"))
            columns = {name: _column(facts) for name, facts in plain["columns"].items()}
            target, weights = plain["target"] and _column(plain["target"]), plain.get("weights")
            earlier = tuple((Release(**release), count) for release, count in plain["earlier"])
            return cls(Encoder(columns), target, earlier, weights and tuple(weights))


def _column(facts: Mapping[str, Any]) -> Column:
    return Column(facts["kind"], facts["bounds"] and tuple(facts["bounds"]), tuple(facts["names"]))


MANY_CLASSES = 20
"""Classes above which more than one for each two rows are refused."""

Agree = Callable[[Callable[[], Fitted]], Fitted]
"""Function that lets one process fit, and gives all the result; see [Note: Bounds of a run]."""


def table(frame: DataFrame, source: str, settings: TrainSettings, agree: Agree) -> Data:
    """Return the data of a table, whose index names places; no error shows a cell."""
    text, label = settings.text_column, settings.label_column
    if frame.empty:
        raise DataError(f"The data set is empty: {source} has no row.")
    groups = None if settings.group_column is None else _groups(frame, settings.group_column, source)
    if settings.group_column is not None:
        frame = frame.drop(columns=settings.group_column)
    named = text != TEXT_COLUMN  # a named column must exist; else the data may be numbers
    if text in frame.columns:
        texts = [str(cell) for cell in _complete(frame, text, source)]
        if label not in frame.columns:
            return unlabelled(texts, settings, sample="one text", groups=groups)
        x = torch.stack([tokens(t, settings.max_length) for t in texts])
        y, classes = class_numbers(_complete(frame, label, source, blank=False))
        facts = {"kind": Kind.TEXT, "sample": "one labelled text", "classes": classes}
        return splits(TensorDataset(x, y), settings, labels=y, groups=groups, **facts)
    if label in frame.columns and not named:
        return _encoded(frame, source, settings, groups, agree)
    labelled = label != LABEL_COLUMN
    missing = repr(text) if named else repr(label) if labelled else f"{text!r} or {label!r}"
    semicolons = " Are its columns separated by semicolons? Write commas." if ";" in frame.columns[0] else ""
    raise DataError(
        f"{source} has no column {missing}, but {listed(frame)}: name the columns with "
        f"--text-column and --label-column.{semicolons}"
    )


def _encoded(
    frame: DataFrame, source: str, settings: TrainSettings, groups: Sequence[Any] | None, agree: Agree
) -> Data:
    label, (given, target) = settings.label_column, _public_facts(settings)
    labels = _complete(frame, label, source, blank=False)
    cells_N = numbers_of(frame[label])
    if target is None and np.isfinite(cells_N).all() and (cells_N % 1 != 0).any():
        raise ConfigurationError(
            f"The label {label!r} holds numbers that are not whole, and each would be a class. Name its bounds in "
            f"--columns ({label}: [0, 100]), or its kind, number or category."
        )
    numbers = target is not None and target.kind == "number"
    if numbers and settings.class_weights is not None:
        raise ConfigurationError(f"class_weights are for classes, and the label {label!r} is a number: leave them out.")
    y_N = _numbers(frame, label, source) if numbers else np.empty(0)
    cells = frame.drop(columns=label)

    def fit() -> Fitted:
        own = parts(len(frame), settings, groups)
        rows, units = own.rows["train"], None if groups is None else np.unique(own.units, return_inverse=True)[1]
        encoder = Encoder.of(cells, given)
        if settings.feature_scale is not None:
            encoder = encoder.scaled(settings.feature_scale)
        facts: dict[str, Any] = {"units": units}
        if target is not None and target.kind == "number" and target.bounds is None:
            facts["target_N"] = y_N[rows]
        if settings.class_weights == BALANCED:
            y, names = _classes(labels, target)
            facts |= {"labels": y.numpy()[rows], "classes": len(names)}
        noise = partial(_noise, settings, len(rows), units, encoder.unbounded)
        encoder, bounds, earlier, weights = fit_privately(encoder, cells.iloc[rows], noise, **facts)
        return Fitted(encoder, target if bounds is None else Column("number", bounds), earlier, weights)

    fitted = agree(fit)
    x = fitted.encoder.encode(cells)
    facts: dict[str, Any] = {"sample": "one row", "numbers": fitted.encoder.numbers, "fitted": fitted}
    if fitted.target is not None and fitted.target.bounds is not None:
        objective = Numbers(*fitted.target.bounds)
        y = objective.scaled(torch.from_numpy(y_N))
        facts |= {"kind": Kind.NUMBERS, "classes": 1, "objective": objective}
        return splits(TensorDataset(x, y), settings, groups=groups, **facts)
    y, names = _classes(labels, fitted.target or target)
    objective = _weighted(names, fitted, settings)
    facts |= {"kind": Kind.FEATURES, "classes": objective.outputs, "objective": objective}
    return splits(TensorDataset(x, y), settings, labels=y, groups=groups, **facts)


def _public_facts(settings: TrainSettings) -> tuple[dict[str, Column], Column | None]:
    """Return the given facts of columns, and of the label."""
    given = parse_columns(read_yaml(Path(settings.columns), names=True)) if settings.columns else {}
    given |= {name.strip(): Column("drop") for name in (settings.drop or "").split(",") if name.strip()}
    given.pop(settings.group_column or "", None)
    target = given.pop(settings.label_column, None)
    if target is not None and target.kind in ("date", "drop"):
        raise ConfigurationError(
            f"The label {settings.label_column!r} is not a {target.kind}: give its classes, or bounds of a number."
        )
    return given, target


def _noise(settings: TrainSettings, rows: int, units: Any, unbounded: Sequence[str]) -> float:
    if settings.statistics_noise is not None:
        return settings.statistics_noise
    if settings.statistics_share is None or settings.target_epsilon is None:
        unknown = (
            f"These columns have no public bounds: {', '.join(unbounded) or 'the label'}. Name bounds in --columns"
        )
        if settings.class_weights == BALANCED and not unbounded:
            unknown = "Balanced weights need private counts of the classes. Name weights by --class-weights"
        raise ConfigurationError(
            f"{unknown}, or give --target-epsilon with --statistics-share, or --statistics-noise, for private ones."
        )
    samples = rows if units is None else 1 + int(units.max())
    budget = {"target_epsilon": settings.target_epsilon, "target_delta": settings.target_delta}
    return noise_for(settings.statistics_share, samples=samples, **budget)


def _classes(labels: list[Any], target: Column | None) -> tuple[Tensor, list[str]]:
    names = list(target.names) if target is not None and target.names else []
    if names:
        number = {name: index for index, name in enumerate(names)}
        found = [number.get(cell_name(label), -1) for label in labels]
        if -1 in found:
            raise DataError("--columns names categories of the label, but a row has another one: name all of them.")
        return torch.tensor(found), names
    y, count = class_numbers(labels)
    if count < 2:
        raise DataError("All rows have one label, so there is nothing to learn.")
    if count > MANY_CLASSES and 2 * count > len(labels):
        raise DataError(
            f"The label has {count} values in {len(labels)} rows, like an identifier or free text. Labels count "
            f"as public: name another --label-column, or the classes or bounds of this one in --columns."
        )
    by_number = dict(zip(y.tolist(), labels, strict=True))
    return y, [cell_name(by_number[index]) for index in range(count)]


def _weighted(names: list[str], fitted: Fitted, settings: TrainSettings) -> Classes:
    if settings.class_weights == BALANCED:
        return Classes(len(names), fitted.weights)
    weights = parse_weights(settings.class_weights)
    if unknown := sorted(weights.keys() - set(names)):
        raise ConfigurationError(f"class_weights: the data have no label {', '.join(unknown)}.")
    return Classes(len(names), tuple(weights.get(name, 1.0) for name in names) if weights else None)


def class_numbers(labels: Sequence[Any]) -> tuple[Tensor, int]:
    """Return class numbers [N], by sorted labels, and the number of classes."""
    try:
        names = sorted(set(labels), key=lambda label: (str(type(label)), label))
    except TypeError:
        raise DataError("A label must be a number or a text.") from None
    number = {name: index for index, name in enumerate(names)}
    return torch.tensor([number[label] for label in labels]), len(names)


def _groups(frame: DataFrame, column: str, source: str) -> list[Any]:
    if column not in frame.columns:
        raise DataError(f"{source} has no column {column!r}, but {listed(frame)}: see --group-column.")
    cells = [cell.strip() if isinstance(cell, str) else cell for cell in _complete(frame, column, source)]
    for place, cell in zip(frame.index, cells, strict=True):
        if type(cell) not in (str, int) or cell == "" or type(cell) is not type(cells[0]):
            raise DataError(
                f"{source}, {place}: {column} names no unit. Give every row one, all of them texts or all whole "
                f"numbers: 1 and '1' would be two units."
            )
    return cells


def _complete(frame: DataFrame, column: str, source: str, *, blank: bool = True) -> list[Any]:
    absent = frame[column].isna().to_numpy()
    if not blank:
        absent = absent | np.array([isinstance(cell, str) and not cell.strip() for cell in frame[column]])
    if absent.any():
        raise DataError(f"{source}, {frame.index[int(absent.argmax())]}: no {column!r}. Leave the row out, or fill it.")
    return frame[column].tolist()


def _numbers(frame: DataFrame, column: str, source: str) -> Any:
    numbers = numbers_of(frame[column])
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        raise DataError(
            f"{source}, {frame.index[int(wrong.argmax())]}: {column} is not a finite number. Leave the row out, or "
            f"correct it."
        )
    return numbers
