"""Physical batches that fit into memory."""

from __future__ import annotations

from dpshard.integrations.opacus.data_loader import DPDataLoader
from dpshard.integrations.opacus.optimizers import DPOptimizer


class BatchMemoryManager:
    """A block in which the loader yields at most `max_physical_batch_size` rows."""

    def __init__(self, *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        self._loader = data_loader.in_physical_batches(max_physical_batch_size)

    def __enter__(self) -> DPDataLoader:
        return self._loader

    def __exit__(self, *error: object) -> None:
        pass
