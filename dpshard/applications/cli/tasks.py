"""The data of a run: tasks, the user's files, and Hugging Face data sets."""

from __future__ import annotations

import csv
import json
import logging
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpshard.applications.cli.data import Data, Kind, splits, unlabelled
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.cli.tables import Agree, class_numbers, table
from dpshard.applications.extras import require
from dpshard.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pandas import DataFrame

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def load(settings: TrainSettings, agree: Agree = lambda fit: fit()) -> Data:
    """Return the data of a run; `agree` is that of tables.py."""
    if settings.task == "digits":
        data = _digits(settings)
    elif settings.task == "pydoc":
        data = _pydoc(settings)
    else:
        data = _own(settings, agree)
    if settings.class_weights is not None and data.objective is None:
        raise ConfigurationError("class_weights are for tables of columns, not for texts and images: leave them out.")
    if not len(data.train):
        raise DataError("The data set is empty: there is no sample to train on.")
    return data


# --- tasks ----------------------------------------------------------------------------------------------------------


def _digits(settings: TrainSettings) -> Data:
    require("sklearn", "train", "task='digits'")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    facts: dict[str, Any] = {"kind": Kind.IMAGE, "sample": "one handwritten digit", "classes": 10}
    return splits(TensorDataset(x, y), settings, labels=y, **facts)


def _pydoc(settings: TrainSettings) -> Data:
    from pydoc_data.topics import topics

    paragraphs = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    texts = [text for text in (" ".join(paragraph.split()) for paragraph in paragraphs) if text]
    return unlabelled(texts, settings, sample="one paragraph of documentation")


def _own(settings: TrainSettings, agree: Agree) -> Data:
    source = str(settings.data)
    option = next((name for name in ("group_column", "columns", "drop") if getattr(settings, name) is not None), None)
    if option is not None and not source.startswith("hf:") and not source.endswith(TABLES):
        raise DataError(
            f"{source} has no columns, and --{option.replace('_', '-')} is for those of a table: give a "
            f"{', '.join(TABLES)} file, or hf:NAME."
        )
    if source.startswith("hf:"):
        return _hugging_face(source.removeprefix("hf:"), settings, agree)
    path = Path(source)
    if path.is_dir():
        return _image_folder(path, settings)
    if path.suffix not in (*TABLES, ".npz"):
        raise DataError(f"{path}: expected a folder of images, a {', '.join((*TABLES, '.npz'))} file, or hf:NAME.")
    if not path.is_file():
        raise DataError(f"{path} does not exist: check the path.")
    if path.suffix == ".npz":
        return _npz(path, settings, agree)
    return table(_parquet(path) if path.suffix == ".parquet" else _read(path), source, settings, agree)


# --- images ---------------------------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Images [3, size, size] in [0, 1] with class numbers, decoded at access."""

    def __init__(self, images: Any, labels: Tensor, size: int, column: str | None = None) -> None:
        self.images, self.labels, self.size, self.column = images, labels.tolist(), size, column

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its class."""
        found = self.images[index]
        with nullcontext(found[self.column]) if self.column else _opened(found) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), self.labels[index]


def _image_folder(folder: Path, settings: TrainSettings) -> Data:
    names = sorted(child for child in folder.iterdir() if child.is_dir())
    files = {path: label for label, child in enumerate(names) for path in sorted(child.rglob("*"))}
    files = {path: label for path, label in files.items() if path.suffix.lower() in IMAGE_SUFFIXES}
    if not files:
        raise DataError(f"The data set is empty: {folder} has no sub-folder (one per class) with images in it.")
    for path in files:
        with _opened(path) as image:
            image.verify()
    return _images(list(files), torch.tensor(list(files.values())), len(names), settings)


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


def _frame(rows: Mapping[str, Row]) -> DataFrame:
    """Return rows as a table; the keys are places, such as "line 7"."""
    require("pandas", "train", "a table")
    import pandas

    # Objects, because a conversion would depend on single cells.
    return pandas.DataFrame(list(rows.values()), index=list(rows), dtype=object)


def _read(path: Path) -> DataFrame:
    """Read lines; no error shows a byte of them."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            parsed = _json_lines(file) if path.suffix == ".jsonl" else _csv_rows(file, delimiter)
            return _frame({f"line {number}": row for number, row in parsed})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no UTF-8 text ({type(error).__name__})"
        raise DataError(f"{path} cannot be read: {why}") from None
    except ValueError as error:
        raise DataError(f"{path}, {error}") from None


def _csv_rows(file: Any, delimiter: str) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(file, delimiter=delimiter)
    names = [name.strip() for name in reader.fieldnames or ()]
    if "" in names or len(set(names)) < len(names):
        raise ValueError("line 1: every column needs its own name (pandas writes an index without one)")
    for row in reader:
        if None in row.values() or None in row:
            raise ValueError(f"line {reader.line_num}: the number of columns differs from the header")
        yield reader.line_num, row


def _json_lines(file: Any) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: expected an object with named fields")
        if line.strip():
            yield number, row


def _parquet(path: Path) -> DataFrame:
    require("pandas", "train", "a table")
    require("pyarrow", "train", "a .parquet file")
    import pandas
    import pyarrow

    try:
        frame = pandas.read_parquet(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: it is not a Parquet file ({type(error).__name__}).") from None
    frame.index = [f"row {number}" for number in range(len(frame))]
    return frame.rename(columns=str)


def _npz(path: Path, settings: TrainSettings, agree: Agree) -> Data:
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
    if x.ndim == 2:
        label = settings.label_column
        names = [f"x{i}" if f"x{i}" != label else f"_{label}" for i in range(x.shape[1])]
        rows = {f"row {i}": dict(zip(names, cells, strict=True)) for i, cells in enumerate(x.tolist())}
        if x.dtype == np.uint8 and settings.feature_scale is None:
            settings = replace(settings, feature_scale=255.0)
        return table(_frame(rows).assign(**{label: y.tolist()}), str(path), settings, agree)
    pixels = torch.from_numpy(x.astype(np.float32)) / (255.0 if x.dtype == np.uint8 else settings.feature_scale or 1.0)
    labels, classes = class_numbers(y.tolist())
    images = TensorDataset(pixels.unsqueeze(1) if pixels.dim() == 3 else pixels, labels)
    return splits(images, settings, labels=labels, kind=Kind.IMAGE, sample="one image", classes=classes)


# --- the Hugging Face hub -------------------------------------------------------------------------------------------


def _hugging_face(name: str, settings: TrainSettings, agree: Agree) -> Data:
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
        cells = _frame({f"row {number}": row for number, row in enumerate(rows.to_list())})
        return table(cells, f"hf:{name}", settings, agree)
    if settings.group_column is not None:
        raise DataError(f"{name!r} holds images, but --group-column needs a table of text or numbers: leave it out.")
    if settings.label_column not in rows.features:
        raise DataError(f"{name!r} has no column {settings.label_column!r}: name the label with --label-column.")
    labels, classes = class_numbers(rows[settings.label_column])
    return _images(rows, labels, classes, settings, column=image)
