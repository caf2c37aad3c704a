"""Kernels of products against float64, of the same half-precision numbers.

Products of half-precision numbers are exact in float32, and so few sums lose little: a forgotten factor, mask or tile
is far outside of the tolerances.
"""

from unittest import mock

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
from dpshard.records import OuterProduct, PerSampleGrad
from dpshard.records.measure import measure
from tests.kernels.triton.support import DEVICE, skip_without_kernels

skip_without_kernels()

DTYPES = [torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(rows, cols):
    """All kernels, of one product."""
    r, c = rows.double(), cols.double()
    gradients = r.mT @ c
    norm_sq = gradients.square().sum((1, 2, 3))
    scale_sq = (r.norm(dim=3) * c.norm(dim=3)).sum(2).square()
    near = {"rtol": 1e-5, "atol": 0.0}
    ghosts = [triton.ghost_norm_sq(rows, cols, floor) for floor in (0.0, 0.3, 1.0)]
    of_groups = gradients.square().sum((2, 3))
    for ghost, floor in zip(ghosts, (0.0, 0.3, 1.0), strict=True):
        bound = torch.maximum(of_groups, floor * scale_sq).sum(1)
        assert_close(ghost.double(), bound, rtol=0.0, atol=1e-5 * float(scale_sq.sum(1).max()))
    assert_close(triton.gradient_norm_sq(rows, cols).double(), norm_sq, **near)
    kept, squares = triton.per_sample(rows, cols)
    assert_close(squares.double(), norm_sq, **near)
    largest = float((r.abs().mT @ c.abs()).max())
    assert_close(kept.double(), gradients, rtol=0.0, atol=1e-6 * largest)
    factors = torch.rand(len(rows), device=DEVICE)
    total = torch.einsum("b,bgrc->grc", factors.double(), gradients)
    assert_close(triton.weighted_sum(rows, cols, factors).double(), total, rtol=0.0, atol=1e-6 * largest * len(rows))
    factors[0], rows = 0, rows.index_fill(0, torch.zeros(1, dtype=torch.long, device=DEVICE), torch.nan)
    rest = torch.einsum("b,bgrc->grc", factors[1:].double(), gradients[1:])
    assert_close(triton.weighted_sum(rows, cols, factors).double(), rest, rtol=0.0, atol=1e-6 * largest * len(rows))
    for result in (*ghosts, kept, squares):
        assert result.dtype == torch.float32


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3),
    G=st.integers(1, 2),
    T=st.integers(1, 70),
    R=st.integers(1, 40),
    C=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_any_sizes(B, G, T, R, C, dtype):
    check(randn(B, G, T, R, dtype=dtype), randn(B, G, T, C, dtype=dtype))


@pytest.mark.parametrize("T", [16, 17, 32, 48, 65, 129])
def test_every_pair_of_blocks_counts_as_often_as_in_the_square(T):
    """One block of positions, even and odd numbers of blocks, whole and cut."""
    check(randn(2, 1, T, 20), randn(2, 1, T, 17))


def test_long_rows_are_summed_in_chunks():
    check(randn(1, 1, 16, 2100), randn(1, 1, 16, 1024))


@pytest.mark.parametrize("most", [1, 128])
def test_large_tiles(most):
    with mock.patch.object(tiles, "MANY", most):
        check(randn(1, 1, 300, 150), randn(1, 1, 300, 130))


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.mT.contiguous().mT,
        lambda x: x[:, :1].expand_as(x),
        lambda x: torch.cat([x, x], 3)[..., ::2],
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    ],
    ids=["transposed", "expanded", "every second", "positions first"],
)
def test_any_strides(strided):
    x = randn(3, 2, 33, 20)
    check(strided(x), randn(3, 2, 33, 18))
    check(randn(3, 2, 33, 18), strided(x))


@pytest.mark.parametrize("dim", range(4))
def test_offsets_of_more_than_32_bits(dim):
    """A tensor of 2**31 elements; only the few used ones touch memory."""
    strides = [27, 9, 3, 1]
    strides[dim] = 2**30
    whole = torch.empty(2**31 + 81, dtype=torch.bfloat16, device=DEVICE)
    rows = whole.as_strided((3, 3, 3, 3), strides)
    rows.copy_(randn(3, 3, 3, 3))
    check(rows, randn(3, 3, 3, 4))


def test_rows_that_are_not_finite_show_in_the_norm_of_their_sample_alone():
    rows, cols = randn(3, 1, 70, 20), randn(3, 1, 70, 20)
    rows[1, 0, 66, 3] = torch.nan
    for norm_sq in (triton.ghost_norm_sq(rows, cols, 0.1), triton.gradient_norm_sq(rows, cols)):
        assert norm_sq.isfinite().tolist() == [True, False, True]


def test_results_are_the_same_every_time():
    rows, cols, factors = randn(2, 1, 130, 40), randn(2, 1, 130, 70), torch.rand(2, device=DEVICE)
    for run in (
        lambda: triton.ghost_norm_sq(rows, cols, 0.1),
        lambda: triton.gradient_norm_sq(rows, cols),
        lambda: triton.weighted_sum(rows, cols, factors),
    ):
        assert torch.equal(run(), run())


def test_fake_tensors_pass_and_products_are_counted():
    rows, cols, factors = randn(2, 1, 32, 16), randn(2, 1, 32, 24), torch.rand(2, device=DEVICE)
    product = 2 * 2 * 32 * 16 * 24
    for operator, arguments, flops in (
        (triton.ghost_norm_sq, (rows, cols, 0.1), 2 * 2 * 3 * 16 * 16 * (16 + 24)),
        (triton.gradient_norm_sq, (rows, cols), product),
        (triton.per_sample, (rows, cols), product),
        (triton.weighted_sum, (rows, cols, factors), product),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        with FlopCounterMode(display=False) as counter:
            operator(*arguments)
        assert counter.get_total_flops() == flops


# --- records ---------------------------------------------------------------------------------------------------------


def record(B=2, T=96, R=24, C=40, dtype=torch.bfloat16):
    return OuterProduct(randn(B, 1, T, R, dtype=dtype), randn(B, 1, T, C, dtype=dtype), torch.Size((R, C)))


def results(record):
    """Return all results of a record, and of its kept gradients."""
    factors = torch.linspace(0.1, 1.0, len(record.rows), device=DEVICE)
    found = [record.per_sample(), record.clipped_sum(factors), *(record.norm_sq(method) for method in NormMethod)]
    for method in NormMethod:
        norm_sq, (left,) = measure([record], method, keep=True, closing=True)
        found += [norm_sq, left.clipped_sum(factors)]
        assert isinstance(left, PerSampleGrad) or method is not NormMethod.INSTANTIATE
    return found


def without_kernels():
    return mock.patch.dict("os.environ", {"DPSHARD_TRITON": "0"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_record_says_the_same_with_and_without_kernels(dtype):
    one = record(dtype=dtype)
    with mock.patch.object(tiles, "MANY", 1):
        assert one.size.by_triton
        found = results(one)
    with without_kernels():
        assert not one.size.by_triton
        expected = results(one)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_norms_have_the_floors_of_what_rounding_hides():
    """Positions that cancel: the rest of the norm is rounding, and must not pass for the norm."""
    one = record(T=64)
    opposite = OuterProduct(torch.cat([one.rows, -one.rows], 2), torch.cat([one.cols, one.cols], 2), one.shape)
    with mock.patch.object(tiles, "MANY", 1):
        found = [opposite.norm_sq(method) for method in NormMethod]
    with without_kernels():
        expected = [opposite.norm_sq(method) for method in NormMethod]
    for a, b in zip(found, expected, strict=True):
        assert bool((a > 0).all())
        assert_close(a, b, rtol=1e-4, atol=0.0)


def test_what_kernels_take():
    def taken(B=2, T=64, R=64, C=64, dtype=torch.bfloat16, other=None):
        return triton.supports_product(randn(B, 1, T, R, dtype=dtype), randn(B, 1, T, C, dtype=other or dtype))

    assert taken()
    assert taken(dtype=torch.float16)
    for wrong in ({"T": 8}, {"R": 4}, {"C": 15}, {"dtype": torch.float32}, {"other": torch.float16}, {"B": 0}):
        assert not taken(**wrong)
    with without_kernels():
        assert not taken()


def test_few_tiles_of_gram_matrices_with_long_rows_are_left_to_torch():
    few, many = record(C=tiles.LONGEST), record()
    with mock.patch.object(triton, "ghost_norm_sq", wraps=triton.ghost_norm_sq) as kernel:
        few.norm_sq(NormMethod.GHOST)
        assert not kernel.called
        many.norm_sq(NormMethod.GHOST)
        assert kernel.called
    assert triton.supports_ghost_norm(64, 100, 50_000)
    assert triton.supports_ghost_norm(4, 100, 8_000)  # a block of GPT2-XL
    assert not triton.supports_ghost_norm(4, 100, 50_000)


@pytest.mark.parametrize(("BG", "T", "size"), [(4, 100, 16), (64, 100, 64), (64, 33, 32), (4, 1024, 128), (1, 16, 16)])
def test_tiles_are_as_large_as_many_programs_allow(BG, T, size):
    assert tiles.ghost_tile(BG, T) == size
    assert size == tiles.SMALLEST or BG * tiles.triangle(T, size) >= tiles.MANY
