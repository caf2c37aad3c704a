import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a forked child hangs where torch had threads

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import dpshard.engine
from tests import seeds

# The same examples in every run; a slow machine is no fault.
hypothesis.settings.register_profile("dpshard", deadline=None, derandomize=True)
hypothesis.settings.load_profile("dpshard")


LONG = (
    "distributed/test_deepspeed.py",
    "applications/cli/test_train.py",
    "distributed/test_sharded_update.py",
    "applications/cli/test_audit.py",
    "integrations/test_torchtitan.py",
    "distributed/test_checkpointer.py",
    "applications/cli/test_sharded.py",
    "distributed/test_tensor_parallel.py",
    "distributed/test_crossed_parts.py",
    "distributed/test_pipeline.py",
    "applications/audit/test_steps.py",
    "applications/test_planner.py",
    "distributed/test_pipeline_checkpoints.py",
    "distributed/test_declared_parts.py",
)
"""Files that take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker ends alone.

    A file stays together, because its tests share launches of ranks, and fixtures.
    """
    folder = Path(__file__).parent
    long = {folder / name: place for place, name in enumerate(LONG)}
    exhaustive = {item.path for item in items if item.get_closest_marker("exhaustive")}
    items.sort(key=lambda item: (long.get(item.path, len(long)), item.path not in exhaustive))


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_looked_for_among_new_objects() -> None:
    """Freeze what is imported: to collect garbage among it takes half a second. The planner unfreezes it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> Iterator[None]:
    """A test passes in every run, or in none."""
    original = dpshard.engine.new_run_secret
    seeds.fix(seeds.current_test())
    yield
    dpshard.engine.new_run_secret = original


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """A test changes no setting of torch that the next one meets, in whatever order they run."""
    before = _settings()
    yield
    assert _settings() == before


def _settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "modes": _len_torch_dispatch_stack(),
        "process group": torch.distributed.is_initialized(),
    }
