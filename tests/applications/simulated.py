"""One rank of a plan, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dpshard.applications.planner.simulation import Setup, Simulation, fake_ranks


@contextmanager
def simulated(setup: Setup) -> Iterator[Simulation]:
    """Yield one rank; raises as `fake_ranks`."""
    with fake_ranks(setup):
        yield Simulation(setup)
