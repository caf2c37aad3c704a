"""Refuse a model that is called within a micro-batch of another engine, whose padding its own engine does not know."""

from __future__ import annotations

import gc
from typing import Any

from dpshard.errors import LogicalBatchError
from dpshard.step.refusals import OTHER_ENGINE

LOOPING: set[Any] = set()
"""Collectors of this process whose `batches` are iterated."""


def refuse_other_loop(tick: int) -> None:
    """Raise LogicalBatchError if a micro-batch of another engine, later than `tick`, is in progress."""
    if _any_later(tick):
        gc.collect()  # a loop that an error has ended may still hold its batch
        if _any_later(tick):
            raise LogicalBatchError(OTHER_ENGINE)


def _any_later(tick: int) -> bool:
    micros = [collector.batch.micro for collector in LOOPING if collector.batch is not None]
    return any(micro is not None and micro.tick > tick for micro in micros)
