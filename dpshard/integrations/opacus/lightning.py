"""A Lightning data module for private training."""

from __future__ import annotations

import copy
from typing import Any

from dpshard.integrations.opacus.data_loader import DPDataLoader


def DPLightningDataModule(datamodule: Any) -> Any:
    """Return a copy whose train loader `make_private` completes, in `configure_optimizers`."""
    private = copy.copy(datamodule)
    made: list[DPDataLoader] = []

    def train_dataloader() -> DPDataLoader:
        if not made:
            made.append(DPDataLoader.from_data_loader(type(datamodule).train_dataloader(private)))
        return made[0]

    private.train_dataloader = train_dataloader
    return private
