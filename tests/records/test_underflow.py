"""Norms at the ends of what floats hold: a square underflows, or a sum overflows, where the gradient does neither.

Failure mode 4: every test, that factor times norm is at most the threshold for every float.
"""

import pytest
import torch

from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, parse_clipping_fn
from dpshard.config import NormMethod
from dpshard.kernels import native
from dpshard.records import Convolution, EmbeddingRecord, OuterProduct, PerSampleGrad, bundles
from dpshard.records.measure import measure
from dpshard.records.numerics import gram, norms
from tests.oracle import randn
from tests.records.adversarial import KINDS, Adversary, exact_norm

ROUNDING = 5e-3
"""Relative error of norms and sums with terms that cancel, just above the floor on rounding."""


class Normalise:
    """Every sample contributes the threshold, however small its gradient, so too small a norm shows."""

    def factor(self, norm_B, threshold):
        return threshold / norm_B

    def __repr__(self):
        return "Normalise()"


NORMALISE = parse_clipping_fn(Normalise())


@pytest.fixture(params=[False, True], ids=["gradual underflow", "flushed to zero"])
def underflow(request):
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor does not flush to zero")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("underflow")
@pytest.mark.parametrize("method", list(NormMethod), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_data_count_more_than_the_threshold(kind, method, monkeypatch):
    """Ghost and instantiated norms, kept and dropped gradients, with and without compiled code."""
    alive = 0
    for seed in range(40):
        records = Adversary(seed).records(kind)
        with monkeypatch.context() as patch:
            if seed % 4 == 0:
                switch_off(patch)
            norm_sq, left = measure(records, method, keep=seed % 3 == 0)
            norm = norm_sq.sqrt()
            if not norm.isfinite():
                continue
            alive += 1
            for function, threshold in ((NORMALISE, 1.0), (NORMALISE, 1e-6), (AbadiClipping(), 1e-3)):
                factor = function.factor(norm, threshold)
                total = sum(record.clipped_sum(factor).double() for record in left)
                assert float(total.norm()) <= threshold * (1 + ROUNDING), (seed, function)
            if left == records:
                assert float(norm) * (1 + ROUNDING) >= exact(records), seed
    assert alive >= 5


def exact(records):
    """Return the norm, also of numbers that this processor flushes to zero."""
    flushes = not float(torch.tensor(1e-40) * 1)
    torch.set_flush_denormal(False)
    norm = exact_norm(records)
    torch.set_flush_denormal(flushes)
    return norm


@pytest.mark.usefixtures("underflow")
@pytest.mark.parametrize("seed", range(20))
def test_groups_of_small_gradients_count_no_more_than_the_threshold(seed):
    gradients = {str(i): Adversary(100 * seed + i).gradient(1, n) for i, n in enumerate((1, 7, 3000))}
    (bundle,) = bundles(gradients)
    norm = bundle.record.norm_sq(NormMethod.CHEAPEST).sqrt()
    if norm.isfinite():
        sums = bundle.clipped_sums(NORMALISE.factor(norm, 1.0))
        assert torch.stack([x.double().norm() for x in sums.values()]).norm() <= 1 + ROUNDING


@pytest.mark.usefixtures("underflow")
@pytest.mark.parametrize("method", list(NormMethod), ids=str)
def test_joined_products_count_no_more_than_the_threshold(method):
    alive = joined = 0
    for seed in range(60):
        products = {str(i): Adversary(1000 * seed + i).product(3, 5) for i in range(6)}
        for bundle in bundles(products):
            norm = bundle.record.norm_sq(method).sqrt()
            if norm.isfinite():
                alive, joined = alive + 1, joined + (len(bundle.shapes) > 1)
                sums = bundle.clipped_sums(NORMALISE.factor(norm, 1.0))
                assert torch.stack([x.double().norm() for x in sums.values()]).norm() <= 1 + ROUNDING, seed
    assert alive >= 50
    assert joined >= 10


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_lost_of_all_pairs_of_positions_counts(compiled, monkeypatch):
    """The T^2 inner products of T equal positions underflow; the addition to T diagonal elements compensates."""
    if not compiled:
        switch_off(monkeypatch)
    rows, cols = torch.full((1, 1, 200, 50), 9e-20), torch.full((1, 1, 200, 3), 1e17)
    record = OuterProduct(rows, cols, torch.Size((50, 3)))
    torch.set_flush_denormal(True)
    norm = record.norm_sq(NormMethod.GHOST).sqrt()
    torch.set_flush_denormal(False)
    assert float(norm) >= exact_norm([record])


def test_an_embedding_whose_inner_products_with_columns_underflow_counts():
    """The head has large rows, so its gradient is as large as the embedding's, and equal."""
    S = 10**6
    head = OuterProduct(torch.full((1, 1, 1, 1), 100.0), torch.full((1, 1, 1, 1), 9.9e-18), torch.Size((1, 1)))
    read = EmbeddingRecord(torch.zeros(1, S, dtype=torch.long), torch.full((1, S, 1), 9.9e-22), torch.Size((1, 1)))
    torch.set_flush_denormal(True)
    norm_sq, _ = measure([head, read], NormMethod.GHOST, keep=False)
    torch.set_flush_denormal(False)
    assert float(norm_sq.sqrt()) >= exact_norm([head, read])


def contribution(record, function, threshold):
    """Return the norm of a sample's part of the clipped sum."""
    norm_sq, (left,) = measure([record], NormMethod.GHOST, keep=False)
    return float(left.clipped_sum(function.factor(norm_sq.sqrt(), threshold)).double().norm())


def switch_off(monkeypatch):
    """As if the library was not built."""
    monkeypatch.setattr(native, "supports_ghost_norm", lambda *_: False)


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
    """Rows too small to square, with columns so large that the products are not small; and the reverse."""
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
    """Two opposite positions: twice their product overflows, their squares do not."""
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
        rows = randn(4, 1, 7, 5).float() * scale
        assert torch.equal(norms(rows), torch.linalg.vector_norm(rows.flatten(1), dim=1))
        assert torch.equal(gram(rows).diagonal(0, 2, 3), (rows @ rows.mT).diagonal(0, 2, 3))


def tied(rows, cols, ids, values):
    rows, cols, values = (torch.as_tensor(x, dtype=torch.float32) for x in (rows, cols, values))
    shape = torch.Size((rows.shape[2], cols.shape[2]))
    return [OuterProduct(rows[:, None], cols[:, None], shape), EmbeddingRecord(torch.tensor(ids), values, shape)]


@pytest.mark.parametrize("method", list(NormMethod))
def test_cross_terms_that_overflow_below_zero_drop_the_sample(method):
    """A tied head and embedding: both squares are finite, twice their inner product is not."""
    signs = torch.tensor([-1.0, 1, 1, 1, -1, -1, 1, 1, -1])
    for records in (
        tied([[[1.4e10], [-1.4e10]]], [[[1.3e10], [1.2e10]]], [[0]], [[[-1.9e18]]]),
        tied((1.0245e-23 * signs)[None, None], [[[-1.2581e21]]], [[0]], [[[-1.2843e18]]]),
    ):
        exact = sum(record.per_sample().double() for record in records).norm()
        norm_sq, _ = measure(records, method, keep=False)
        for function in (AbadiClipping(), AutomaticClipping()):
            assert function.factor(norm_sq.sqrt(), 1.0).double() * exact <= 1


@pytest.mark.parametrize("method", list(NormMethod))
def test_a_head_and_an_embedding_that_cancel_keep_what_rounding_leaves(method):
    """The inner product of two gradients, both far smaller than the terms of their sums."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        R, C, T = (int(torch.randint(1, n, (), generator=generator)) for n in (3, 6, 5))
        r, c = torch.randn(T, R, generator=generator) * 500, torch.randn(T, C, generator=generator) * 1000
        v = torch.randn(1, C, generator=generator) * 1e7
        off = (1e-3 * torch.randn(n, C, generator=generator) for n in (T, 1))
        rows, cols = torch.cat((r, -r)), torch.cat((c, c * (1 + next(off))))
        values = torch.cat((v, -v * (1 + next(off))))
        records = tied(rows[None], cols[None], [[0, 0]], values[None])
        exact = sum(by_hand(record) for record in records)[0].norm()
        norm_sq, _ = measure(records, method, keep=False)
        assert AbadiClipping().factor(norm_sq.sqrt(), 1.0).double() * exact <= 1 + 1e-6


def by_hand(record):
    """The per-sample gradients in float64."""
    if isinstance(record, OuterProduct):
        return (record.rows.double().mT @ record.cols.double()).sum(1)
    return EmbeddingRecord(record.ids, record.values.double(), record.shape).per_sample()


@pytest.mark.parametrize("method", list(NormMethod))
def test_a_sum_that_overflows_where_its_factor_is_large_is_dropped(method):
    """One element per side: its norm needs no square, and rows times a factor are infinite."""
    convolution = Convolution(
        *(torch.full((2, 1, 1, 1), x) for x in (1e-37, 1e37)), torch.Size((1, 1, 1)), (1,), (0,), (1,), 1
    )
    product = OuterProduct(torch.full((2, 1, 1, 1), 1e37), torch.full((2, 1, 1, 1), 1e-37), torch.Size((1, 1)))
    for record in (product, convolution):
        norm_sq, (left,) = measure([record], method, keep=False)
        total = left.clipped_sum(AutomaticClipping().factor(norm_sq.sqrt(), 1e3))
        assert float(total.norm()) <= 2e3


def test_norms_of_large_gradients_do_not_stop_growing():
    gradient = torch.full((1, 2**25), 2.0**-12.01)
    gradient[0, :64] = 1
    exact = gradient.double().norm()
    assert float(PerSampleGrad(gradient).norm_sq(NormMethod.INSTANTIATE).sqrt()) == pytest.approx(
        float(exact), rel=1e-4
    )
