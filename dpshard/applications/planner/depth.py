"""Counts of deep models by shallow ones; see [Note: Extrapolation]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from dpshard.applications.planner.counts import Counts
from dpshard.applications.planner.extrapolation import extrapolated
from dpshard.applications.planner.models import PRESETS, Transformer
from dpshard.applications.planner.simulation import Clipping, Setup, Simulation

FEW = 4
"""Both ends, and two with equals at both sides."""
MANY = 12


class Extrapolation:
    """A rank with `pieces` blocks more than `few`."""

    def __init__(self, few: Simulation, more: Simulation, pieces: int, whole: Callable[[], Simulation]) -> None:
        self._few, self._more, self._pieces, self._whole = few, more, pieces, cache(whole)
        self.elements = few.elements + pieces * (more.elements - few.elements)
        self.shard_elements = few.shard_elements + pieces * (more.shard_elements - few.shard_elements)
        self.positions = few.positions

    def count(self, clipping: Clipping | None, micro_batch: int) -> Counts:
        """See Simulation."""
        few, more = (rank.count(clipping, micro_batch) for rank in (self._few, self._more))
        found = extrapolated(few, more, self._pieces)
        return self._whole().count(clipping, micro_batch) if found is None else found


def rank_of(setup: Setup) -> Simulation | Extrapolation:
    """Return a rank of `setup`, within `fake_ranks`."""
    shape = setup.model if isinstance(setup.model, Transformer) else PRESETS.get(setup.model)
    # DDP's buckets ignore the borders of blocks.
    if shape is None or shape.layers <= MANY or setup.shard == "ddp":
        return Simulation(setup)
    few, more = (Simulation(replace(setup, model=replace(shape, layers=n))) for n in (FEW, FEW + 1))
    return Extrapolation(few, more, shape.layers - FEW, lambda: Simulation(setup))
