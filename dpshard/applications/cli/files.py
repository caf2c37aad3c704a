"""The user's data: image folders, JSON lines, CSV, .npz, and Hugging Face data sets."""

from __future__ import annotations

import csv
import json
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpshard.applications.cli.data import Data, Kind, splits, tokens, unlabelled
from dpshard.applications.cli.settings import TEXT_COLUMN, TrainSettings
from dpshard.applications.extras import require
from dpshard.errors import DataError

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def load(settings: TrainSettings) -> Data:
    """Read the data at `settings.data`; raise DataError if that fails."""
    source = str(settings.data)
    tables = source.startswith("hf:") or source.endswith((".jsonl", ".csv"))
    if settings.group_column is not None and not tables:
        raise DataError(
            f"{source} has no columns, and --group-column names one: give a .jsonl or .csv file, or hf:NAME."
        )
    if source.startswith("hf:"):
        return _hugging_face(source.removeprefix("hf:"), settings)
    path = Path(source)
    if path.is_dir():
        return _image_folder(path, settings)
    readers: dict[str, Callable[[Path, TrainSettings], Data]] = {
        ".jsonl": lambda path, settings: _table(_read(path, _json_lines), str(path), settings),
        ".csv": lambda path, settings: _table(_read(path, _csv_rows), str(path), settings),
        ".npz": _npz,
    }
    if path.suffix not in readers:
        raise DataError(f"{path}: expected a folder of images, a {', '.join(readers)} file, or hf:NAME.")
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    return readers[path.suffix](path, settings)


# --- images ---------------------------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Image files, or the images of a `column` of rows, with class numbers; decoded at access."""

    def __init__(self, images: Any, labels: Tensor, size: int, column: str | None = None) -> None:
        self.images = images
        self.labels = labels.tolist()
        self.size = size
        self.column = column

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image [3, size, size] in [0, 1], and its class."""
        found = self.images[index]
        with nullcontext(found[self.column]) if self.column else _opened(found) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), self.labels[index]


def _image_folder(folder: Path, settings: TrainSettings) -> Data:
    classes = sorted(child for child in folder.iterdir() if child.is_dir())
    found = [
        (path, label)
        for label, child in enumerate(classes)
        for path in sorted(child.rglob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not found:
        raise DataError(f"The data set is empty: {folder} has no sub-folder (one per class) with images in it.")
    for path, _ in found:
        with _opened(path) as image:
            image.verify()
    labels = torch.tensor([label for _, label in found])
    return _images([path for path, _ in found], labels, len(classes), settings)


def _images(images: Any, labels: Tensor, classes: int, settings: TrainSettings, column: str | None = None) -> Data:
    dataset = Images(images, labels, settings.image_size, column)
    return splits(dataset, settings, labels=labels, kind=Kind.IMAGE, sample="one image", classes=classes)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, ValueError) as error:  # PIL calls a broken file a syntax error
        raise DataError(f"The image {path} cannot be read: {error}. Repair or remove it.") from error


# --- tables ---------------------------------------------------------------------------------------------------------


Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""Rows by place in the file, such as "line 7"."""


def _read(path: Path, parse: Callable[[Any], Iterable[tuple[int, Row]]]) -> Rows:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = {f"line {number}": row for number, row in parse(file)}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise DataError(f"{path}, {error}") from error
    if not rows:
        raise DataError(f"The data set is empty: {path} has no row.")
    return rows


def _csv_rows(file: Any) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(file, restkey="", restval=None)
    for row in reader:
        if None in row.values() or "" in row:
            raise ValueError(f"line {reader.line_num}: the number of columns differs from the header")
        yield reader.line_num, row


def _json_lines(file: Any) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: not JSON: {error}") from error
        if row is not None and not isinstance(row, dict):
            raise ValueError(f"line {number}: expected an object with named fields")
        if row is not None:
            yield number, row


def _table(rows: Rows, source: str, settings: TrainSettings) -> Data:
    text, label = settings.text_column, settings.label_column
    columns = list(next(iter(rows.values())))
    groups = None if settings.group_column is None else _groups(rows, settings.group_column, columns, source)
    named = text != TEXT_COLUMN  # a named column must exist; else the data may be numbers
    if text in columns:
        texts = [str(cell) for cell in _column(rows, text, source)]
        if label not in columns:
            return unlabelled(texts, settings, sample="one text", groups=groups)
        x = torch.stack([tokens(t, settings.max_length) for t in texts])
        facts: dict[str, Any] = {"kind": Kind.TEXT, "sample": "one labelled text"}
    elif label in columns and not named:
        columns.remove(label)
        x = torch.tensor([_numbers(rows, column, source) for column in columns]).T / settings.feature_scale
        facts = {"kind": Kind.FEATURES, "sample": "one row"}
    else:
        missing = repr(text) if named else f"{text!r} or {label!r}"
        raise DataError(
            f"{source} has no column {missing}, but {', '.join(map(repr, columns))}: name the columns with "
            f"--text-column and --label-column."
        )
    y, classes = _classes(_column(rows, label, source))
    return splits(TensorDataset(x, y), settings, labels=y, groups=groups, classes=classes, **facts)


def _groups(rows: Rows, column: str, columns: list[str], source: str) -> list[Any]:
    """Return the unit of every row, and take its column out of `columns`."""
    if column not in columns:
        raise DataError(f"{source} has no column {column!r}, but {', '.join(map(repr, columns))}: see --group-column.")
    columns.remove(column)
    cells = [cell.strip() if isinstance(cell, str) else cell for cell in _column(rows, column, source)]
    for place, cell in zip(rows, cells, strict=True):
        if type(cell) not in (str, int) or cell == "" or type(cell) is not type(cells[0]):
            raise DataError(
                f"{source}, {place}: {column}={cell!r} names no unit. Give every row one, all of them texts or all "
                f"whole numbers: 1 and '1' would be two units."
            )
    return cells


def _column(rows: Rows, column: str, source: str) -> list[Any]:
    for place, row in rows.items():
        if row.get(column) is None:
            raise DataError(f"{source}, {place}: no {column!r}.")
    return [row[column] for row in rows.values()]


def _numbers(rows: Rows, column: str, source: str) -> list[float]:
    numbers = []
    for place, value in zip(rows, _column(rows, column, source), strict=True):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{source}, {place}: {column}={value!r} is not a number; name a column of text with --text-column."
            ) from error
    return numbers


def _classes(labels: Sequence[Any]) -> tuple[Tensor, int]:
    """Return class numbers [N], by sorted labels, and the number of classes."""
    try:
        names = sorted(set(labels), key=lambda label: (str(type(label)), label))
    except TypeError as error:
        raise DataError(f"A label must be a number or a text: {error}.") from error
    number = {name: index for index, name in enumerate(names)}
    return torch.tensor([number[label] for label in labels]), len(names)


def _npz(path: Path, settings: TrainSettings) -> Data:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except KeyError as error:
        raise DataError(f"{path} must hold two arrays, x and y: {error}") from error
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "biuf" or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{path}: x {list(x.shape)} must be numbers [N, D] or images [N, H, W] or [N, C, H, W], and y "
            f"{list(y.shape)} a label for each."
        )
    scale = 255.0 if x.dtype == np.uint8 else settings.feature_scale
    features = torch.from_numpy(x.astype(np.float32)) / scale
    if features.dim() == 3:
        features = features.unsqueeze(1)
    labels, classes = _classes(y.tolist())
    image = features.dim() == 4
    return splits(
        TensorDataset(features, labels),
        settings,
        labels=labels,
        kind=Kind.IMAGE if image else Kind.FEATURES,
        sample="one image" if image else "one row",
        classes=classes,
    )


# --- the Hugging Face hub -------------------------------------------------------------------------------------------


def _hugging_face(name: str, settings: TrainSettings) -> Data:
    require("datasets", "hf", f"data='hf:{name}'")
    import datasets

    name, _, config = name.partition(":")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no message per retry
    try:
        parts = datasets.load_dataset(name, config or None)
    except Exception as error:  # many types
        raise DataError(f"The data set {name!r} cannot be loaded from the Hugging Face hub: {error}") from error
    rows = parts["train"] if "train" in parts else next(iter(parts.values()))
    image = next((name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)), None)
    if image is None:
        return _table({f"row {number}": row for number, row in enumerate(rows.to_list())}, f"hf:{name}", settings)
    if settings.group_column is not None:
        raise DataError(f"{name!r} holds images, but --group-column needs a table of text or numbers: leave it out.")
    if settings.label_column not in rows.features:
        raise DataError(f"{name!r} has no column {settings.label_column!r}: name the label with --label-column.")
    labels, classes = _classes(rows[settings.label_column])
    return _images(rows, labels, classes, settings, column=image)
