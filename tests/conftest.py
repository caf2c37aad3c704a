import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a forked child hangs where torch had threads

import dpshard.engine
from tests import seeds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("exhaustive") is None)


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> Iterator[None]:
    """A test passes in every run, or in none."""
    original = dpshard.engine.new_run_secret
    seeds.fix(seeds.current_test())
    yield
    dpshard.engine.new_run_secret = original
