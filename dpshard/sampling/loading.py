"""Read the samples of micro-batches, collate them, and pad them to one size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpshard.errors import DataError
from dpshard.sampling.packing import PlacedDocuments, collate_packed
from dpshard.sampling.plans import MicroBatchPlan
from dpshard.sampling.tokens import TokenStore
from dpshard.sampling.units import CollatedRows, DrawnUnits, KeyedUnits, UnitTensors, are_plain


def as_is(batch: Any) -> Any:
    """Return what was read; workers pickle this function."""
    return batch


def load(
    dataset: Any,
    plans: Iterable[MicroBatchPlan],
    *,
    sample_size: int,
    rows_per_unit: int = 1,
    packed: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Iterator[tuple[MicroBatchPlan, Any]]:
    """Return pairs of a plan and its collated data, in the order of `plans`, read ahead by `num_workers` processes.

    `plans` is consumed lazily. An item of the data set is a sample, or a unit of `rows_per_unit` rows; if `packed`, a
    document. Other arguments are those of `torch.utils.data.DataLoader`. Raises DataError as `require_dataset` does, at
    once.
    """
    require_dataset(dataset, sample_size)
    if packed:
        if isinstance(dataset, KeyedUnits):
            raise DataError(
                f"packing= takes each document for a sample, and {type(dataset).__name__} holds units of rows. "
                f"Pass the documents, or leave packing out."
            )
        dataset, collate_fn = PlacedDocuments(dataset), collate_packed
    elif type(dataset) is TensorDataset and collate_fn is None:
        dataset = _TensorRows(dataset) if rows_per_unit == 1 else UnitTensors(dataset, rows_per_unit)
        collate_fn = as_is
    elif type(dataset) is TokenStore and collate_fn is None and rows_per_unit == 1:
        dataset, collate_fn = _Sequences(dataset), as_is
    else:
        units = isinstance(dataset, KeyedUnits)
        if units or rows_per_unit > 1:
            collate_fn = CollatedRows(collate_fn or default_collate, rows_per_unit)
        if units:
            dataset = DrawnUnits(dataset)
        elif hasattr(dataset, "__getitems__"):
            dataset = _OneByOne(dataset)
    ahead: deque[MicroBatchPlan] = deque()
    loader = DataLoader(
        dataset,
        batch_sampler=_Announced(plans, ahead, keyed=isinstance(dataset, DrawnUnits)),
        collate_fn=collate_fn or default_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        worker_init_fn=worker_init_fn,
    )
    return ((plan, _padded(data, plan)) for data in loader for plan in [ahead.popleft()])


def load_stream(
    batches: Iterable[tuple[int, list[Any]]],
    plan: Callable[[int, list[Any]], list[MicroBatchPlan]],
    *,
    rows_per_unit: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Iterator[tuple[MicroBatchPlan, Any]]:
    """Yield pairs of a plan and its data, from pairs of a step and the samples of its logical batch.

    `plan` returns the micro-batches of a logical batch on this rank; their indices are places in it.
    """
    collate = collate_fn or default_collate
    if rows_per_unit > 1:
        collate = CollatedRows(collate, rows_per_unit)
    for step, samples in batches:
        for micro in plan(step, samples):
            yield micro, _padded(collate([samples[i] for i in micro.indices[: max(1, micro.samples)]]), micro)


def require_dataset(dataset: Any, sample_size: int) -> None:
    """Raise DataError unless `dataset` is map-style and has exactly `sample_size` > 0 samples."""
    kind = type(dataset).__name__
    remedy = "Poisson sampling reads any sample by its index: wrap the data in a class with __getitem__ and __len__."
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{kind} makes its own batches, but Poisson sampling must draw them: pass loader.dataset. collate_fn, "
            f"num_workers and pin_memory are arguments of engine.batches, too."
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(f"{kind} is an IterableDataset, which can only be read in its own order. {remedy}")
    if not hasattr(dataset, "__getitem__"):
        raise DataError(f"{kind} has no __getitem__. {remedy}")
    try:
        size = len(dataset)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise DataError(f"{kind} has no length, and the sampling probability depends on it. {remedy}") from error
    if size == 0:
        raise DataError(f"The data set ({kind}) is empty: check the path or the filter that it was made with.")
    if size != sample_size:
        raise DataError(
            f"The data set ({kind}) has {size} samples, but the privacy guarantee was computed for "
            f"sample_size={sample_size}. Pass sample_size={size} to the engine, or the data set it was made for."
        )


@dataclass(frozen=True)
class _Announced:
    """A batch sampler that appends each plan to `ahead`.

    Each index comes with the placement if rows are packed, or with the step's key if `keyed`.
    """

    plans: Iterable[MicroBatchPlan]
    ahead: deque[MicroBatchPlan]
    keyed: bool

    def __iter__(self) -> Iterator[list[Any]]:
        for plan in self.plans:
            self.ahead.append(plan)
            # Padding follows collation: a collate_fn that sorts its rows must not move it.
            indices = plan.indices[: max(1, plan.samples)]
            if plan.placement is not None:
                yield [(i, plan.placement) for i in indices]
            else:
                yield [(i, plan.rows_key) for i in indices] if self.keyed else indices


def _padded(data: Any, plan: MicroBatchPlan) -> Any:
    """Fill the collated data of the samples of `plan` up to B samples with copies of the last one.

    Rows are dimension 0 of tensors and arrays, and the items of lists of strings or numbers. Raises DataError if no
    part of `data` has a row per sample.
    """
    if plan.placement is not None:
        return data
    K = plan.rows_per_unit
    rows, B = max(1, plan.samples) * K, len(plan.indices) * K
    places = torch.tensor([min(place, rows - K + place % K) for place in range(B)], device="cpu")
    found = False

    def pad(x: Any) -> Any:
        nonlocal found
        if isinstance(x, Tensor):
            if x.dim() == 0 or x.shape[0] != rows:
                return x
            found = True
            return x if rows == B else x.index_select(0, places.to(x.device))
        if isinstance(x, np.ndarray):
            if x.ndim == 0 or x.shape[0] != rows:
                return x
            found = True
            return x[places.numpy()]
        if isinstance(x, Mapping):
            filled = {key: pad(value) for key, value in x.items()}
            return filled if type(x) is dict else type(x)(filled)  # type: ignore[call-arg]
        if isinstance(x, (list, tuple)):
            if len(x) == rows and are_plain(x):
                found = True
                return type(x)(x[place] for place in places.tolist())
            items = [pad(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        return x

    filled = pad(data)
    if not found:
        raise DataError(
            f"collate_fn returned no tensor with one row for each of the {rows} that it got (as dimension 0), so the "
            f"micro-batch cannot be padded. Return tensors with the samples first, or tuples, lists and dicts of them; "
            f"do not drop, merge or repeat samples."
        )
    return filled


class _TensorRows(Dataset):
    """A TensorDataset read by whole micro-batches."""

    def __init__(self, dataset: TensorDataset):
        self.tensors = dataset.tensors

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices, device="cpu")
        return [tensor[rows.to(tensor.device)] for tensor in self.tensors]


class _Sequences(Dataset):
    def __init__(self, store: TokenStore):
        self._store = store

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._store.rows(indices)


class _OneByOne(Dataset):
    """A data set read one sample at a time, so that no transform gets two."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)
