"""The use of kernels: nobody needs Triton, and a failed launch breaks nothing."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dpshard.kernels import triton
from dpshard.kernels.triton import dispatch

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu():
    """A machine with a GPU and Triton, and a stand-in for its first launch."""
    launch = mock.Mock()
    module = SimpleNamespace(launch=launch)
    dispatch._runs.cache_clear()
    with (
        mock.patch.object(dispatch, "_has_tensor_cores", return_value=True),
        mock.patch.object(dispatch, "_is_installed", return_value=True),
        mock.patch.dict(sys.modules, {"dpshard.kernels.triton.common": module}),
        mock.patch.object(triton, "common", module, create=True),
    ):
        yield launch
    dispatch._runs.cache_clear()


def test_kernels_run_where_triton_launches(gpu):
    assert triton.run_on(GPU)
    assert triton.run_on(GPU)
    gpu.assert_called_once_with(GPU)


def test_a_machine_without_a_compiler_goes_on_without_kernels(gpu):
    gpu.side_effect = RuntimeError("Failed to find C compiler")
    with pytest.warns(UserWarning, match=r"cuda:0.*C compiler.*DPSHARD_TRITON=0"):
        assert not triton.run_on(GPU)
    assert not triton.run_on(GPU)


def test_kernels_can_be_switched_off(gpu, monkeypatch):
    monkeypatch.setenv("DPSHARD_TRITON", "0")
    assert not triton.run_on(GPU)
    gpu.assert_not_called()


def test_nothing_runs_on_a_cpu_but_in_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not triton.run_on(torch.device("cpu"))


def test_a_machine_without_a_gpu_launches_nothing():
    if not torch.cuda.is_available():
        assert not triton.run_on(GPU)
