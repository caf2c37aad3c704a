"""The data of a run: three splits, and the facts that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from dpshard.applications.cli.settings import TrainSettings
from dpshard.errors import DataError
from dpshard.sampling.packing import IGNORED
from dpshard.sampling.units import UnitDataset

BYTES = 256
"""Byte tokens; then come BEGIN and PAD."""
BEGIN, PAD = BYTES, BYTES + 1
VOCABULARY = BYTES + 2
MASK = VOCABULARY
"""Token id of a masked byte."""

MASKED_SHARE = 0.15
ROWS_PER_UNIT = 8
"""Rows of a unit in a step, unless the settings say otherwise."""

SPLIT_SEED = 0
"""Every run holds out the same samples."""


class Kind(Enum):
    """Kinds of x and y."""

    IMAGE = auto()  # x float [C, H, W] in [0, 1], y class
    FEATURES = auto()  # x float [D], the encoded columns of a table, y class
    NUMBERS = auto()  # the same, y float in [-1, 1]
    TEXT = auto()  # x token ids [T], y class
    LANGUAGE = auto()  # x token ids [T], y next token ids [T], IGNORED after the end
    MASKED = auto()  # x token ids [T], some of them MASK, y the true ids there, IGNORED elsewhere


@dataclass(frozen=True, kw_only=True)
class Data:
    """Disjoint splits; the run trains on and protects only `train`."""

    train: Any
    """Of map style, with a length, as the others."""
    validation: Any
    test: Any
    kind: Kind
    sample: str
    """The protected unit, such as "one image"."""
    classes: int = VOCABULARY
    """Classes, or tokens."""
    guessing: float | None = None
    """Share of the commonest class in the test samples."""
    numbers: int = 0
    """Leading features that are scaled numbers, of a table."""
    objective: Any = None
    """An Objective of a table; None: the cross-entropy of each sample."""
    fitted: Any = None
    """`tables.Fitted` of a table."""
    rows_per_unit: int = 1
    """Rows of a training unit; those of other splits are single."""

    def example(self) -> Any:
        """Return x of a training row."""
        return (self.train.dataset if isinstance(self.train, UnitDataset) else self.train)[0][0]


def splits(
    dataset: Any,
    settings: TrainSettings,
    *,
    labels: Tensor | None = None,
    groups: Sequence[Any] | None = None,
    **facts: Any,
) -> Data:
    """Split `dataset` by SPLIT_SEED, with `labels` [N], and the unit of each row in `groups`, which stays whole."""
    of_units = parts(len(dataset), settings, groups)
    own = of_units.rows
    if labels is not None and len(own["test"]) > 0:
        facts["guessing"] = float(labels[torch.from_numpy(own["test"])].bincount().max()) / len(own["test"])

    def part(indices: Any) -> Dataset[Any]:
        if isinstance(dataset, TensorDataset):  # for fast reading of whole micro-batches
            return TensorDataset(*dataset[torch.from_numpy(indices)])
        return Subset(dataset, indices.tolist())

    found = {name: part(indices) for name, indices in own.items()}
    if groups is not None and len(own["train"]) > 0:
        K = settings.rows_per_unit or ROWS_PER_UNIT
        found["train"] = UnitDataset(found["train"], of_units.units, K)
        facts |= {"rows_per_unit": K, "sample": f"one {settings.group_column}, up to {K} rows in a step"}
    return Data(**found, **facts)


class Parts(NamedTuple):
    """The rows of each split, and the unit of each training row."""

    rows: dict[str, Any]
    units: Any


def parts(count: int, settings: TrainSettings, groups: Sequence[Any] | None) -> Parts:
    """Return the splits of `count` rows; see `splits`."""
    names, unit_of_row = np.unique(np.arange(count) if groups is None else groups, return_inverse=True)
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    test = round(len(names) * settings.test_fraction)
    validation = test + round(len(names) * settings.validation_fraction)

    def rows_of(units: Any) -> Any:
        return units if groups is None else np.flatnonzero(np.isin(unit_of_row, units))

    rows = {"test": rows_of(shuffled[:test]), "validation": rows_of(shuffled[test:validation])}
    rows["train"] = rows_of(shuffled[validation:])
    return Parts(rows, unit_of_row[rows["train"]])


def tokens(text: str, length: int) -> Tensor:
    """Return the token ids [length + 1]: BEGIN, the first `length` bytes of `text`, PAD."""
    ids = [BEGIN, *text.encode()[:length]]
    return torch.tensor(ids + [PAD] * (length + 1 - len(ids)))


def unlabelled(texts: Sequence[str], settings: TrainSettings, **facts: Any) -> Data:
    """Return the splits of `texts`; `facts` are those of `splits`."""
    if settings.objective == "masked":
        return splits(masked(texts, settings), settings, kind=Kind.MASKED, classes=VOCABULARY + 1, **facts)
    return splits(language(texts, settings), settings, kind=Kind.LANGUAGE, **facts)


def language(texts: Sequence[str], settings: TrainSettings) -> TensorDataset:
    """Return each text, and its next bytes as targets."""
    ids = _all_tokens(texts, settings)
    return TensorDataset(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == PAD, IGNORED))


def masked(texts: Sequence[str], settings: TrainSettings) -> TensorDataset:
    """Return texts with 15% of their bytes (at least one) masked, and these as targets."""
    ids = _all_tokens(texts, settings)
    own = ids < BYTES
    lots = torch.rand(ids.shape, generator=torch.Generator().manual_seed(SPLIT_SEED)).masked_fill(~own, 2)
    count = (own.sum(1, keepdim=True) * MASKED_SHARE).round().clamp(min=1)
    hidden = own & (lots.argsort(1).argsort(1) < count)  # of ranks from 0
    return TensorDataset(ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED))


def _all_tokens(texts: Sequence[str], settings: TrainSettings) -> Tensor:
    if not texts:
        raise DataError("The data set is empty: it holds no text.")
    return torch.stack([tokens(text, settings.max_length) for text in texts])
