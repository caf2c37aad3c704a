"""What is kept of the DataLoader that Poisson sampling replaces."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How `loader` loads samples, as keywords of `engine.batches`; which samples it loads is for the engine to say."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
    }
