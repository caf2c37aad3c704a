"""The data of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

from dpshard.applications.cli import files
from dpshard.applications.cli.data import Data, Kind, size, splits, unlabelled
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.extras import require
from dpshard.errors import ConfigurationError, DataError


def load(settings: TrainSettings, agree: Callable[[Callable[[], Any]], Any] = lambda fit: fit()) -> Data:
    """Return the data of a run; `agree` is that of tables.py."""
    if settings.task == "digits":
        data = _digits(settings)
    elif settings.task == "pydoc":
        data = _pydoc(settings)
    else:
        data = files.load(settings, agree)
    if settings.class_weights is not None and data.objective is None:
        raise ConfigurationError("class_weights are for tables of columns, not for texts and images: leave them out.")
    if size(data.train) == 0:
        raise DataError("The data set is empty: there is no sample to train on.")
    return data


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
