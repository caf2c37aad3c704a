"""Fixtures that switch compiled code off, and set the number of threads."""

import shutil

import pytest
import torch

from dpshard.kernels import native
from dpshard.kernels.native.library import library


@pytest.fixture(autouse=True)
def needs_compiler():
    """Skip without a C compiler, because the package then has no compiled code."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert native.is_built()


@pytest.fixture
def switch_off(monkeypatch):
    def switch_off():
        monkeypatch.setenv("DPSHARD_NATIVE", "0")
        library.cache_clear()

    yield switch_off
    library.cache_clear()


@pytest.fixture
def set_threads():
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)
