"""Compiled ghost norms are those of the gradients, for any strides, registers and number of threads."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard.config import NormMethod
from dpshard.kernels import native
from dpshard.records import OuterProduct
from tests.kernels.native.support import by_hand, narrow_library


def product(B, G, T, R, C):
    generator = torch.Generator().manual_seed(T)
    return torch.randn(B, G, T, R, generator=generator), torch.randn(B, G, T, C, generator=generator)


SIZES = [
    (1, 1, 1, 1, 1),
    (2, 1, 3, 1700, 2),
    (1, 2, 390, 4, 900),
    (3, 2, 15, 7, 40),
    (2, 1, 65, 16, 129),
    (2, 3, 128, 5, 6),
    (2, 1, 129, 300, 3),
    (1, 2, 401, 9, 8),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(lambda x: x, id="row by row"),
        pytest.param(lambda x: x.mT.contiguous().mT, id="element by element"),
        pytest.param(lambda x: x[:, :, :1].expand(x.shape), id="one vector for all positions"),
        pytest.param(lambda x: x.transpose(0, 2).contiguous().transpose(0, 2), id="positions first"),
        pytest.param(lambda x: torch.cat((x, x), 3)[..., ::2], id="with gaps"),
    ],
)
def test_ghost_norms_are_those_of_the_gradients(size, stored):
    rows, cols = product(*size)
    for pair in ((stored(rows), cols), (rows, stored(cols)), (stored(rows), stored(cols))):
        norm_sq, scale_sq = by_hand(*pair)
        for floor, exact in ((0.0, norm_sq), (0.7, torch.maximum(norm_sq, 0.7 * scale_sq)), (1.0, scale_sq)):
            ours = native.floored_ghost_norm_sq(*pair, floor)
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact.sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_narrow_registers_give_the_same_norms(size, tmp_path):
    """Registers of a processor without AVX-512, the most common kind."""
    narrow = narrow_library(tmp_path)
    rows, cols = product(*size)
    norm_sq, scale_sq = by_hand(rows, cols)
    out, vectors = torch.empty(size[0]), [(x.data_ptr(), x.stride()) for x in (rows, cols)]
    for floor, exact in ((0.0, norm_sq), (1.0, scale_sq)):
        narrow.ghost_norms(*vectors, size, floor, out.data_ptr())
        torch.testing.assert_close(out.double(), exact.sum(1), rtol=1e-5, atol=0)


def test_threads_and_other_samples_change_no_bit_of_a_norm(set_threads):
    rows, cols = product(5, 2, 200, 30, 20)
    norms = []
    for threads in (1, 2, 7):
        set_threads(threads)
        norms.append(torch.stack([native.floored_ghost_norm_sq(rows, cols, floor) for floor in (0.0, 1.0)]))
    alone = [
        torch.stack([native.floored_ghost_norm_sq(rows[i : i + 1], cols[i : i + 1], floor) for floor in (0.0, 1.0)])
        for i in range(5)
    ]
    assert all(torch.equal(norms[0], others) for others in (*norms[1:], torch.cat(alone, 1)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_sample(bad):
    rows, cols = product(3, 1, 40, 9, 8)
    rows[1, 0, 17, 3] = bad
    for floor in (0.0, 1e-4, 1.0):
        assert native.floored_ghost_norm_sq(rows, cols, floor).isfinite().tolist() == [True, False, True]


def test_norms_of_nothing_are_zeros():
    for size in ((2, 1, 0, 3, 4), (2, 1, 3, 0, 4), (0, 1, 3, 4, 5)):
        assert torch.equal(native.floored_ghost_norm_sq(*product(*size), 1.0), torch.zeros(size[0]))


def test_records_take_it_for_float32_and_give_the_same_norms_without(switch_off):
    rows, cols = product(4, 2, 70, 30, 20)
    wide = OuterProduct(rows.double(), cols.double(), torch.Size((60, 20)))
    record = OuterProduct(rows, cols, torch.Size((60, 20)))
    assert native.supports_ghost_norm(rows.device, rows.dtype)
    assert not native.supports_ghost_norm(rows.device, torch.float64)
    assert not native.supports_ghost_norm(torch.device("meta"), rows.dtype)
    compiled = record.norm_sq(NormMethod.GHOST)
    switch_off()
    assert not native.supports_ghost_norm(rows.device, rows.dtype)
    torch.testing.assert_close(compiled, record.norm_sq(NormMethod.GHOST))
    torch.testing.assert_close(compiled.double(), wide.norm_sq(NormMethod.GHOST), rtol=1e-5, atol=0)


@pytest.mark.parametrize("T", [1, 8, 9, 16, 65, 128])
def test_products_are_counted_as_tiles_of_half_a_matrix(T):
    pairs = sum(16 * 8 for left in range(0, T, 16) for top in range(left, T, 8))
    with FlopCounterMode(display=False) as counter:
        native.floored_ghost_norm_sq(*product(3, 2, T, 5, 7), 0.0)
    assert counter.get_total_flops() == 3 * 2 * pairs * 2 * (5 + 7)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("n", [1000, 8192, 50257, 150528])
@pytest.mark.exhaustive
def test_the_rounding_of_long_sums_does_not_grow(n, compiled, switch_off):
    """Two positions of constants nearly cancel: errors of one sign, in sums as long as a vocabulary."""
    if not compiled:
        switch_off()
    rows = torch.randn(3, 1, 2, 64, generator=torch.Generator().manual_seed(n))
    rows[:, :, 1] = -rows[:, :, 0]
    cols = torch.full((3, 1, 2, n), 1.3)
    cols[:, :, 1] *= 1.05
    norm_sq = OuterProduct(rows, cols, torch.Size((64, n))).norm_sq(NormMethod.GHOST)
    exact, _ = by_hand(rows, cols)
    assert bool((norm_sq.double() / exact.sum(1)).sub(1).abs().max() < 0.03)


def test_products_that_overflow_only_when_doubled_do_not():
    rows, cols = torch.full((1, 1, 32, 1), 1.4e19), torch.full((1, 1, 32, 3), 0.018)
    norm_sq = native.floored_ghost_norm_sq(rows, cols, 0.0)
    torch.testing.assert_close(norm_sq.double(), by_hand(rows, cols)[0].sum(1), rtol=1e-5, atol=0)


def test_other_dtypes_and_sizes_are_refused():
    rows, cols = product(2, 1, 5, 3, 4)
    for pair in ((rows.double(), cols), (rows, cols.double()), (rows, cols[:1]), (rows[:, :, :4], cols)):
        with pytest.raises(ValueError, match="No ghost norm"):
            native.floored_ghost_norm_sq(*pair, 0.0)


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        norm_sq = native.floored_ghost_norm_sq(torch.empty(3, 2, 70, 5), torch.empty(3, 2, 70, 7), 0.0)
    assert norm_sq.shape == (3,)
