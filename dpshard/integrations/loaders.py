"""The data of a DataLoader, with other batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from dpshard.engine import PrivacyEngine
from dpshard.step.logical_batch import LogicalBatch


def batches_of(
    loader: DataLoader[Any], engine: PrivacyEngine, micro_batch_size: int | None, *, steps: int, pad: bool
) -> Iterator[LogicalBatch]:
    """Return logical batches from the data set of `loader`, with its options that sampling keeps."""
    return engine.batches(
        loader.dataset,
        micro_batch_size,
        steps=steps,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        pad=pad,
    )
