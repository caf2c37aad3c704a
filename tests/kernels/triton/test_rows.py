"""Norms and weighted sums of stored rows against float64, alone and in records."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard.config import NormMethod
from dpshard.kernels import triton
from dpshard.kernels.triton import tiles
from dpshard.records import PerSampleGrad
from dpshard.records.bundle import Bundle
from dpshard.records.numerics import norms
from dpshard.records.stacked import Stacked
from tests.kernels.triton.support import DEVICE, skip_without_kernels

skip_without_kernels()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(uses=st.integers(1, 3), B=st.integers(1, 70), n=st.integers(1, 600), dtype=st.sampled_from(DTYPES))
def test_any_sizes(uses, B, n, dtype):
    x, weights = randn(uses, B, n, dtype=dtype), torch.rand(uses, B, device=DEVICE)
    norm_sq = triton.row_norm_sq(x.flatten(0, 1))
    assert_close(norm_sq.double(), x.double().square().sum(2).flatten(), rtol=1e-5, atol=1e-30)
    total, size = (torch.einsum("ub,ubn->un", weights.double(), y) for y in (x.double(), x.double().abs()))
    found = triton.weighted_rows(x, weights)
    assert bool(((found.double() - total).abs() <= 1e-6 * size).all())
    assert norm_sq.dtype == found.dtype == torch.float32


@pytest.mark.parametrize("strided", [lambda x: x.mT.contiguous().mT, lambda x: x[:, ::2], lambda x: x[:1].expand_as(x)])
def test_any_strides(strided):
    x = strided(randn(6, 40))
    assert_close(triton.row_norm_sq(x), x.square().sum(1), rtol=1e-5, atol=0.0)
    weights = torch.rand(6, device=DEVICE)
    assert_close(triton.weighted_rows(x[None], weights[None])[0], weights @ x, rtol=1e-5, atol=1e-6)


def test_long_rows():
    x = randn(2, tiles.LONGEST)
    assert triton.supports_row_norms(x)
    assert_close(triton.row_norm_sq(x).double(), x.double().square().sum(1), rtol=1e-5, atol=0.0)
    assert not triton.supports_row_norms(randn(1, tiles.LONGEST + 1))


@pytest.mark.parametrize("value", [1e-30, 1e-22, 1e-19])
def test_squares_that_underflow_count(value):
    """A norm is never below that of its row: squares of small numbers vanish in float32."""
    x = torch.full((1, 300), value, device=DEVICE)
    assert float(triton.row_norm_sq(x).double()) >= float(x.double().square().sum()) * (1 - 1e-6)
    assert_close(triton.row_norm_sq(x), norms(x).square(), rtol=1e-4, atol=0.0)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [NAN, float("inf"), 1e30])
def test_norms_that_are_not_finite_show_in_their_row_alone(bad):
    x = randn(3, 500)
    x[1, 400] = bad
    assert triton.row_norm_sq(x).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_rows_of_weight_0_add_nothing(bad):
    x, weights = randn(2, 5, 30), torch.rand(2, 5, device=DEVICE)
    expected = [weights[0] @ x[0], weights[1, 1:] @ x[1, 1:]]
    x[1, 0], weights[1, 0] = bad, 0
    assert_close([*triton.weighted_rows(x, weights)], expected)


def test_records_leave_samples_out():
    """Alone, in a bundle, and stacked: what `without` names has the weight 0, and may hold NaN."""
    gradient, weight_B = randn(4, 3, 7), torch.tensor([0.5, 0.0, 0.25, 1.0], device=DEVICE)
    expected = torch.einsum("b,bij->ij", weight_B, gradient)
    gradient[1] = NAN
    record, dead_B = PerSampleGrad(gradient), weight_B == 0
    assert_close(record.without(dead_B).clipped_sum(weight_B), expected)
    bundle = Bundle(PerSampleGrad(gradient.flatten(1)), {"w": torch.Size((3, 7))})
    assert_close(bundle.without(dead_B).clipped_sums(weight_B)["w"], expected)
    stacked = Stacked(PerSampleGrad(torch.cat([gradient, 2 * gradient])), 2)
    twice = torch.stack([weight_B, weight_B])
    sums = stacked.without(twice == 0).clipped_sums(twice)
    assert_close([*sums], [expected, 2 * expected])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 7), (5,), (5, 4097)])
def test_records_say_the_same_with_and_without_kernels(monkeypatch, dtype, shape):
    record, weight_B = PerSampleGrad(randn(*shape, dtype=dtype)), torch.rand(5, device=DEVICE)
    assert triton.supports_rows(record.gradient)
    found = record.norm_sq(NormMethod.CHEAPEST), record.clipped_sum(weight_B)
    monkeypatch.setenv("DPSHARD_TRITON", "0")
    assert not triton.supports_rows(record.gradient)
    expected = record.norm_sq(NormMethod.CHEAPEST), record.clipped_sum(weight_B)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_kernels_take():
    assert triton.supports_rows(randn(2, 3))
    assert not triton.supports_rows(randn(2, 3, dtype=torch.float64))
    assert not triton.supports_rows(randn(2, 3, dtype=torch.complex64))
    assert not triton.supports_rows(randn(0, 3))
    assert not triton.supports_rows(randn(2, 0))


def test_fake_tensors_pass_and_sums_are_counted():
    x, weights = randn(2, 5, 30), torch.rand(2, 5, device=DEVICE)
    for operator, arguments, flops in (
        (triton.row_norm_sq, (x.flatten(0, 1),), 0),
        (triton.weighted_rows, (x, weights), 2 * 2 * 5 * 30),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        with FlopCounterMode(display=False) as counter:
            operator(*arguments)
        assert counter.get_total_flops() == flops
