"""Norms at the ends of what floats hold: a square underflows, or a sum overflows, where the gradient does neither.

PITFALLS row 4: every test, that factor times norm is at most the threshold for every float.
"""

import pytest
import torch

from dpshard import native
from dpshard.clipping import AbadiClipping, AutomaticClipping
from dpshard.config import NormMethod
from dpshard.rules.records import Convolution, OuterProduct
from dpshard.rules.records.measure import measure
from dpshard.rules.records.numerics import hidden_by_underflow, norms
from tests.oracle import randn


@pytest.fixture(params=[False, True], ids=["gradual underflow", "flushed to zero"])
def underflow(request):
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor does not flush to zero")
    yield
    torch.set_flush_denormal(False)


def contribution(record, function, threshold):
    """The norm that a sample adds to the clipped sum."""
    norm_sq, (left,) = measure([record], NormMethod.GHOST, keep=False)
    return float(left.clipped_sum(function.factor(norm_sq.sqrt(), threshold)).double().norm())


def switch_off(monkeypatch):
    """As where the library was not built."""
    monkeypatch.setattr(native, "takes_ghost_norm", lambda *_: False)


@pytest.mark.usefixtures("underflow")
@pytest.mark.parametrize("function", [AutomaticClipping(), AbadiClipping()], ids=["automatic", "abadi"])
@pytest.mark.parametrize(
    ("T", "dtype", "compiled"),
    [
        (1, torch.float32, True),
        (1, torch.float64, True),
        (3, torch.float64, True),
        *((T, torch.float32, compiled) for T in (3, 20) for compiled in (True, False)),
    ],
)
def test_what_underflows_in_a_square_is_not_taken_for_nothing(T, dtype, compiled, function, monkeypatch):
    """Rows too small to be squared, columns so large that their products are not small at all, and the reverse."""
    if not compiled:
        switch_off(monkeypatch)
    wider = 1.0 if dtype == torch.float32 else 1e134
    for small, large, n in ((2e-23, 1e19, 50_000), (5e-20, 1e18, 1000), (3e-23, 1e16, 50_000)):
        row = torch.full((1, 1, T, n), small / wider, dtype=dtype)
        col = torch.full((1, 1, T, 3), large * wider, dtype=dtype)
        for rows, cols in ((row, col), (col, row)):
            record = OuterProduct(rows, cols, torch.Size((rows.shape[3], cols.shape[3])))
            for threshold in (1.0, 1e-3):
                assert contribution(record, function, threshold) <= threshold


@pytest.mark.usefixtures("underflow")
def test_pixels_that_are_too_small_to_be_squared_count():
    images, gradients = torch.full((1, 1, 64, 4, 4), 5e-23), torch.full((1, 1, 64, 4, 4), 1e17)
    for pair in ((images, gradients), (gradients, images)):
        record = Convolution(*pair, torch.Size((64, 64, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
        assert record.size.gram_by_pixels
        assert 0 < contribution(record, AutomaticClipping(), 1e-3) <= 1e-3


@pytest.mark.parametrize("compiled", [True, False])
def test_a_norm_that_overflows_below_zero_drops_the_sample(compiled, monkeypatch):
    """Of two positions that oppose each other, twice their product overflows, and the squares of neither."""
    if not compiled:
        switch_off(monkeypatch)
    rows, cols = torch.zeros(1, 1, 18, 4), torch.zeros(1, 1, 18, 4)
    rows[0, 0, [0, 1, 2, 17], [0, 1, 2, 0]] = torch.tensor([4.18e9, 4.18e9, 4.18e9, -4.18e9])
    cols[0, 0, [0, 1, 2, 17], 0] = 4.18e9
    record = OuterProduct(rows, cols, torch.Size((4, 4)))
    assert contribution(record, AbadiClipping(), 1.0) == 0
    assert contribution(record, AutomaticClipping(), 1.0) == 0


def test_ordinary_norms_lose_nothing_to_underflow():
    for scale in (1e-10, 1.0, 1e10):
        rows, cols = randn(4, 1, 7, 5).float() * scale, randn(4, 1, 7, 6).float()
        assert torch.equal(norms(rows) + hidden_by_underflow(rows, cols), norms(rows))
