"""The use of kernels: nobody needs Triton, and a failed launch breaks nothing."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dpshard.kernels import triton
from dpshard.kernels.triton import dispatch

GPU = torch.device("cuda", 0)
TritonError = pytest.importorskip("triton.errors").TritonError


@pytest.fixture
def gpu():
    """A machine with a GPU and Triton, and a stand-in for the self-test."""
    self_test = SimpleNamespace(
        **{name: mock.Mock(return_value=None) for name in ("wrong_noise", "wrong_product", "wrong_digest")}
    )
    clear_caches()
    with (
        mock.patch.object(dispatch, "_has_tensor_cores", return_value=True),
        mock.patch.object(dispatch, "_is_installed", return_value=True),
        mock.patch.dict(sys.modules, {"dpshard.kernels.triton.self_test": self_test}),
        mock.patch.object(triton, "self_test", self_test, create=True),
    ):
        yield self_test
    clear_caches()


def clear_caches():
    for tried_out in (dispatch._runs, dispatch._multiplies, dispatch._adds_digests):
        tried_out.cache_clear()


def test_kernels_run_where_triton_launches(gpu):
    assert triton.run_on(GPU)
    assert triton.run_on(GPU)
    gpu.wrong_noise.assert_called_once_with(GPU)


def test_a_machine_without_a_compiler_goes_on_without_kernels(gpu):
    gpu.wrong_noise.side_effect = RuntimeError("Failed to find C compiler")
    with pytest.warns(UserWarning, match=r"cuda:0.*C compiler.*DPSHARD_TRITON=0"):
        assert not triton.run_on(GPU)
    assert not triton.run_on(GPU)


def test_kernels_that_do_not_compile_are_not_used(gpu):
    gpu.wrong_noise.side_effect = TritonError("unsupported layout")
    with pytest.warns(UserWarning, match="cannot launch kernels on cuda:0.*unsupported layout"):
        assert not triton.run_on(GPU)


def test_noise_that_differs_switches_kernels_off(gpu):
    gpu.wrong_noise.return_value = "release_"
    with pytest.warns(UserWarning, match="kernel release_ gives wrong results on cuda:0"):
        assert not triton.run_on(GPU)
    assert not triton.run_on(GPU)


def test_products_that_differ_are_left_to_torch_for_their_dtype(gpu):
    """The self-test of each dtype runs once, when its first product is asked for."""
    gpu.wrong_product.side_effect = lambda device, dtype: "weighted_sum" if dtype == torch.float16 else None
    rows = torch.empty(2, 1, 16, 16, device="meta", dtype=torch.bfloat16)
    with mock.patch.object(dispatch, "run_on", return_value=True):
        assert triton.supports_product(rows, rows)
        with pytest.warns(UserWarning, match="kernel weighted_sum gives wrong results"):
            assert not triton.supports_product(rows.half(), rows.half())
        assert not triton.supports_product(rows.half(), rows.half())
        assert triton.supports_product(rows, rows)
    assert gpu.wrong_product.call_count == 2


def test_digests_that_differ_are_left_to_torch(gpu):
    assert triton.supports_digest(GPU)
    assert triton.supports_digest(GPU)
    gpu.wrong_digest.assert_called_once_with(GPU)
    clear_caches()
    gpu.wrong_digest.return_value = "add_digests_"
    with pytest.warns(UserWarning, match="kernel add_digests_ gives wrong results on cuda:0"):
        assert not triton.supports_digest(GPU)
    assert not triton.supports_digest(GPU)
    assert triton.run_on(GPU)


def test_each_group_of_kernels_tells_if_it_passed(gpu):
    gpu.wrong_rows = mock.Mock(return_value="row_norm_sq")
    gpu.wrong_product.side_effect = lambda device, dtype: "weighted_sum" if dtype == torch.float16 else None
    dispatch._adds_rows.cache_clear()
    with pytest.warns(UserWarning, match="gives wrong results"):
        found = {group: is_used() for group, is_used in dispatch.self_tests(GPU).items()}
    dispatch._adds_rows.cache_clear()
    assert found == {
        "noise": True,
        "rows": False,
        "digest": True,
        "products in bfloat16": True,
        "products in float16": False,
    }
    assert not any(is_used() for is_used in dispatch.self_tests(torch.device("cpu")).values())


def test_kernels_can_be_switched_off(gpu, monkeypatch):
    monkeypatch.setenv("DPSHARD_TRITON", "0")
    assert not triton.run_on(GPU)
    assert not triton.supports_digest(GPU)
    gpu.wrong_noise.assert_not_called()


def test_nothing_runs_on_a_cpu_but_in_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not triton.run_on(torch.device("cpu"))


def test_a_machine_without_a_gpu_launches_nothing():
    if not torch.cuda.is_available():
        assert not triton.run_on(GPU)
