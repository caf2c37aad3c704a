"""Options of a DataLoader that Poisson sampling keeps."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options as keywords of `engine.batches`."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
    }
