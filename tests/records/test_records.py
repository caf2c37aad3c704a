"""Records against the per-sample gradients that they stand for.

Failure modes: 4 test_dead_samples_contribute_exact_zeros; 6 test_gather_ignores_what_was_not_read;
7 test_a_sum_of_records_has_the_norm_of_the_sum; 10 test_half_precision_is_summed_in_float32.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard.config import NormMethod
from dpshard.records import Convolution, EmbeddingRecord, OuterProduct, PerSampleGrad, RoutedProduct, bundles
from dpshard.records.cost import ProductSize, ghost_flops
from dpshard.records.measure import inner, join, measure
from dpshard.records.of_samples import of_samples
from tests.oracle import randn

METHODS = list(NormMethod)
few = settings(max_examples=25, deadline=None, derandomize=True)
sizes = st.integers(1, 4)


def outer(B, T, R, C, G=1, shape=None):
    return OuterProduct(randn(B, G, T, R), randn(B, G, T, C), torch.Size(shape or (G * R, C)))


def gather(B, T, V, C, shape=None):
    return EmbeddingRecord(torch.randint(-1, V, (B, T)), randn(B, T, C), torch.Size(shape or (V, C)))


def convolution(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    rank = len(space)
    positions = [(n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in space]
    shape = torch.Size((P, C // groups, *[kernel] * rank))
    stride, padding, dilation = ((x,) * rank for x in (stride, padding, dilation))
    x, g = randn(B, k, C, *space), randn(B, k, P, *positions)
    return Convolution(x, g, shape, stride, padding, dilation, groups)


def routed(B, N, R, C, G=1, shape=None):
    """Return rows of any sample for any group, in any order; some without a group."""
    sample, group = torch.randint(0, B, (N,)), torch.randint(-1, G + 1, (N,))
    return RoutedProduct(randn(N, R), randn(N, C), sample, group, B, torch.Size(shape or (G, R, C)))


def by_hand(record):
    """Per-sample gradients in plain loops."""
    if isinstance(record, RoutedProduct):
        R, C = record.rows.shape[1], record.cols.shape[1]
        out = torch.zeros(record.batch_size, record.shape.numel() // (R * C), R, C).double()
        for i, group, row, col in zip(record.sample, record.group, record.rows, record.cols, strict=True):
            if 0 <= group < out.shape[1]:
                out[i, group] += torch.outer(row, col)
        return out.view(record.batch_size, *record.shape)
    if isinstance(record, Convolution):
        return torch.stack([_kernel_gradient(record, x, g) for x, g in zip(record.input, record.gradient, strict=True)])
    B = len(record.rows if isinstance(record, OuterProduct) else getattr(record, "ids", getattr(record, "gradient", 0)))
    if isinstance(record, PerSampleGrad):
        return record.gradient
    out = []
    for i in range(B):
        if isinstance(record, OuterProduct):
            groups = [
                sum(torch.outer(r, c) for r, c in zip(rows, cols, strict=True))
                for rows, cols in zip(record.rows[i], record.cols[i], strict=True)
            ]
            out.append(torch.cat(groups).reshape(record.shape))
        else:
            table = torch.zeros(record.shape.numel() // record.values.shape[2], record.values.shape[2]).double()
            for row, value in zip(record.ids[i], record.values[i], strict=True):
                if row >= 0:
                    table[row] += value
            out.append(table.view(record.shape))
    return torch.stack(out)


def _kernel_gradient(record, images, gradients):
    """By autograd, one sample alone."""
    kernel = torch.zeros(record.shape, dtype=images.dtype, requires_grad=True)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(record.stride) - 1]
    output = convolve(images, kernel, None, record.stride, record.padding, record.dilation, record.groups)
    return torch.autograd.grad(output, kernel, gradients)[0]


def norms_sq(per_sample):
    return per_sample.flatten(1).square().sum(1) if per_sample.dim() > 1 else per_sample.square()


def check(record):
    per_sample, factor = by_hand(record), torch.rand(len(by_hand(record))).double()
    assert_close(record.per_sample(), per_sample)
    assert_close(record.clipped_sum(factor), torch.einsum("b,b...->...", factor, per_sample))
    for method in METHODS:
        assert_close(record.norm_sq(method), norms_sq(per_sample))


@few
@given(B=sizes, T=st.integers(1, 9), R=sizes, C=sizes, G=st.integers(1, 3))
def test_outer_product(B, T, R, C, G):
    check(outer(B, T, R, C, G))


@few
@given(
    B=sizes,
    k=st.integers(1, 2),
    groups=st.integers(1, 2),
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_convolution(B, k, groups, rank, kernel, stride, padding, dilation):
    space = (7, 6, 5)[:rank]
    record = convolution(B, k, 2 * groups, 3 * groups, space, kernel, stride, padding, dilation, groups)
    check(record)
    assert_close(record.outer().per_sample(), by_hand(record))
    for by_pixels in (True, False):  # the Gram matrix of the windows
        with mock.patch.object(ProductSize, "gram_by_pixels", by_pixels):
            assert_close(record.norm_sq(NormMethod.GHOST), norms_sq(by_hand(record)))


def test_small_images_with_many_channels_need_neither_windows_nor_gradients_for_their_norm():
    record = convolution(2, 1, 64, 64, (8, 8), 3, padding=1)
    T, pixels = 64, 10 * 10
    with FlopCounterMode(display=False) as counter:
        norm_sq = record.norm_sq(NormMethod.CHEAPEST)
    assert_close(norm_sq, norms_sq(by_hand(record)))
    assert counter.get_total_flops() == 2 * 2 * (T * T * 64 + pixels * pixels * 64)
    assert counter.get_total_flops() < 2 * 2 * T * 64 * 64 * 9 / 2  # of the per-sample gradients
    assert not convolution(2, 1, 64, 64, (8, 8), 3, padding=1, stride=2).size.gram_by_pixels
    assert not convolution(2, 1, 4, 4, (8, 8), 3, padding=1).size.gram_by_pixels


def test_convolutions_of_one_kernel_join():
    records = [convolution(3, k, 4, 6, (5, 5), 3, groups=2) for k in (1, 2)]
    total = sum(by_hand(r) for r in records)
    for method in METHODS:
        norm_sq, left = measure(records, method, keep=True)
        assert_close(norm_sq, norms_sq(total))
        assert_close(sum(r.clipped_sum(torch.ones(3).double()) for r in left), total.sum(0))


@few
@given(B=sizes, N=st.integers(0, 20), R=sizes, C=sizes, G=st.integers(1, 3))
def test_routed_product(B, N, R, C, G):
    check(routed(B, N, R, C, G))


def test_rows_that_meet_no_weight_may_hold_anything():
    record = routed(3, 8, 2, 2)
    record.cols[record.group != 0] = torch.nan
    check(record)


@few
@given(B=sizes, T=st.integers(1, 9), V=sizes, C=sizes)
def test_gather(B, T, V, C):
    check(gather(B, T, V, C))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_per_sample(shape):
    check(PerSampleGrad(randn(4, *shape)))


def test_a_record_has_the_shape_of_its_parameter():
    check(outer(3, 5, 2, 6, G=2, shape=(4, 3, 2)))
    check(gather(3, 5, 4, 6, shape=(4, 3, 2)))
    check(gather(3, 5, 4, 1, shape=(2, 2)))


def test_gather_ignores_what_was_not_read():
    record = EmbeddingRecord(
        torch.tensor([[-1, 2, 2]]), torch.tensor([[[torch.nan], [1.0], [2.0]]]), torch.Size((3, 1))
    )
    assert_close(record.per_sample(), torch.tensor([[[0.0], [0.0], [3.0]]]))
    for method in METHODS:
        assert_close(record.norm_sq(method), torch.tensor([9.0]))


def test_gather_norms_need_no_table():
    # A table of 10^9 rows would not fit; rows that were read do.
    record = EmbeddingRecord(torch.tensor([[5, 10**9, 5]]), randn(1, 3, 2), torch.Size((2 * 10**9, 2)))
    expected = (record.values[0, 0] + record.values[0, 2]).square().sum() + record.values[0, 1].square().sum()
    for method in METHODS:
        assert_close(record.norm_sq(method)[0], expected)


def uses(B=3):
    """Return records of uses of one weight [6, 4]: linear, transposed, grouped, lookups, broadcasting."""
    shape = (6, 4)
    return [
        outer(B, 5, 6, 4),
        outer(B, 2, 6, 4),
        outer(B, 3, 3, 4, G=2, shape=shape),
        gather(B, 5, 6, 4),
        gather(B, 1, 6, 4),
        gather(B, 7, 24, 1, shape=shape),
        PerSampleGrad(randn(B, *shape)),
        PerSampleGrad(randn(B, *shape)),
        routed(B, 9, 6, 4, shape=shape),
        routed(B, 7, 6, 4, shape=shape),
        routed(B, 9, 3, 4, G=2, shape=shape),
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chosen=st.lists(st.integers(0, 10), min_size=1, max_size=5), method=st.sampled_from(METHODS), keep=st.booleans())
def test_a_sum_of_records_has_the_norm_of_the_sum(chosen, method, keep):
    every = uses()
    records = [every[i] for i in chosen]
    total = sum(by_hand(r) for r in records)
    norm_sq, left = measure(records, method, keep=keep)
    assert_close(norm_sq, norms_sq(total))
    factor = torch.rand(3).double()
    assert_close(sum(r.clipped_sum(factor) for r in left), torch.einsum("b,b...->...", factor, total))


def test_join_leaves_one_record_of_each_kind():
    records = uses()
    joined = join(records)
    assert len(joined) == 7  # outer products, grouped ones, rows, elements, gradients, routed rows, those of groups
    assert_close(sum(r.per_sample() for r in joined), sum(by_hand(r) for r in records))


@pytest.mark.parametrize("first", range(11))
@pytest.mark.parametrize("second", range(11))
def test_inner_products(first, second):
    every = uses()
    a, b = every[first], every[second]
    assert_close(inner(a, b), (by_hand(a) * by_hand(b)).flatten(1).sum(1))


def test_vanishing_sums_have_no_negative_square():
    """Rounding may leave slightly more than zero, never less."""
    rows, cols = randn(2, 1, 4, 3), randn(2, 1, 4, 3)
    opposite = OuterProduct(torch.cat([rows, -rows], 2), torch.cat([cols, cols], 2), torch.Size((3, 3)))
    ids = torch.randint(0, 3, (2, 4))
    lookups = EmbeddingRecord(torch.cat([ids, ids], 1), torch.cat([rows[:, 0], -rows[:, 0]], 1), torch.Size((3, 3)))
    for method in METHODS:
        for records in (
            [opposite],
            [lookups],
            [lookups, opposite],
            [PerSampleGrad(rows[:, 0]), PerSampleGrad(-rows[:, 0])],
        ):
            norm_sq, _ = measure(records, method, keep=False)
            assert bool((norm_sq >= 0).all())
            assert float(norm_sq.max()) < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_an_instantiated_gradient_is_kept_where_asked_for(method):
    record = outer(2, 200, 2, 2)
    _, kept = measure([record], method, keep=True)
    _, dropped = measure([record], method, keep=False)
    assert isinstance(kept[0], OuterProduct if method is NormMethod.GHOST else PerSampleGrad)
    assert isinstance(dropped[0], OuterProduct)


def test_the_cheapest_norm():
    def instantiates(B, T, R, C, kept=False, closing=False):
        return outer(B, T, R, C).size.instantiates(kept=kept, closing=closing)

    assert not instantiates(2, 20, 500, 500)  # T^2 (R + C) against 2 T R C FLOPs
    assert instantiates(2, 800, 100, 100)
    assert not instantiates(2, 200, 300, 300)
    assert instantiates(2, 200, 300, 300, kept=True, closing=True)  # the clipped sum needs the gradients anyway
    assert not instantiates(2, 200, 300, 300, kept=True)  # but by then they have left the cache,
    assert instantiates(2, 110, 100, 100, kept=True)  # if they are not small
    assert not instantiates(2, 1, 20, 20, kept=True)  # one position: no product at all
    assert instantiates(1, 3, 100, 100, kept=True)  # one sample's gradient is the batch's
    assert not instantiates(1, 3, 100, 100)


def test_the_cheapest_norm_on_a_gpu_with_kernels():
    """Tiles of an unwritten gradient cost only their product; kept gradients are written anyway."""

    def instantiates(B, T, R, C, by_triton, kept=False):
        size = ProductSize(B, 1, T, R, C, torch.float32, torch.device("cuda"), 0, by_triton=by_triton)
        return size.instantiates(kept=kept)

    assert instantiates(64, 128, 128, 128, by_triton=True)  # 2 T R C against 3/4 T^2 (R + C)
    assert not instantiates(64, 128, 128, 128, by_triton=False)
    assert not instantiates(64, 128, 1024, 1024, by_triton=True)
    assert not instantiates(4, 100, 1024, 1024, by_triton=True)
    assert not instantiates(4, 100, 1024, 1024, by_triton=False)
    assert instantiates(
        4, 100, 2**14, 128, by_triton=True
    )  # few tiles, long rows: Gram matrices by torch, at its speed
    assert not instantiates(64, 100, 2**14, 1024, by_triton=True)
    assert not instantiates(64, 128, 128, 128, by_triton=True, kept=True)
    assert not outer(2, 60, 100, 100).size.by_triton  # on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 127, 128, 200, 513])
def test_the_ghost_norm_costs_what_the_choice_assumes(T, dtype):
    """Any number of blocks of positions is exact; by symmetry, about half of the Gram matrices is enough."""
    record = outer(2, T, 5, 7)
    record = replace(record, rows=record.rows.to(dtype), cols=record.cols.to(dtype))
    with FlopCounterMode(display=False) as counter:
        norm_sq = record.norm_sq(NormMethod.GHOST)
    assert_close(norm_sq, norms_sq(record.per_sample()))
    if T > 1:
        products = 2 * ghost_flops(T, 5, 7, torch.device("cpu"), dtype)
        assert counter.get_total_flops() <= 1.02 * products
        assert counter.get_total_flops() >= 2 * T * T * 12


def test_the_cheapest_method_keeps_a_large_gradient_only_to_use_it_at_once():
    """At a micro-batch of 1, the gradients of all layers would take the memory of the model."""
    large, small = outer(1, 3, 100, 100), outer(1, 10, 3, 3)
    for record, closing, kept in ((large, False, False), (large, True, True), (small, False, True)):
        norm_sq, (left,) = measure([record], NormMethod.CHEAPEST, keep=True, closing=closing)
        assert isinstance(left, PerSampleGrad) is kept
        assert_close(norm_sq, norms_sq(by_hand(record)))
    assert isinstance(measure([large], NormMethod.INSTANTIATE, keep=True)[1][0], PerSampleGrad)


def test_a_dead_sample_of_a_convolution_contributes_exact_zeros():
    record = convolution(3, 1, 2, 2, (5,), 3)
    record.input[1], record.gradient[1] = torch.nan, torch.inf
    alive = record.without(torch.tensor([False, True, False]))
    assert bool((alive.per_sample()[1] == 0).all())
    assert bool(torch.isfinite(alive.clipped_sum(torch.ones(3).double())).all())


@pytest.mark.parametrize("index", range(11))
def test_dead_samples_contribute_exact_zeros(index):
    record = uses()[index]
    for name in ("rows", "cols", "values", "gradient"):
        if hasattr(record, name):
            getattr(record, name)[record.sample == 1 if isinstance(record, RoutedProduct) else 1] = torch.nan
    alive = record.without(torch.tensor([False, True, False]))
    assert bool((alive.per_sample()[1] == 0).all())
    assert_close(alive.per_sample()[[0, 2]], record.per_sample()[[0, 2]])
    assert bool(torch.isfinite(alive.clipped_sum(torch.ones(3).double())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    records = [
        OuterProduct(torch.randn(2, 1, 300, 4).to(dtype), torch.randn(2, 1, 300, 4).to(dtype), torch.Size((4, 4))),
        EmbeddingRecord(torch.randint(0, 4, (2, 300)), torch.randn(2, 300, 4).to(dtype), torch.Size((4, 4))),
        PerSampleGrad(100 * torch.randn(2, 4, 4).to(dtype)),  # 100^2 * 16 overflows float16
    ]
    for record in records:
        exact = by_hand(_double(record))
        assert record.clipped_sum(torch.ones(2)).dtype == torch.float32
        assert_close(record.clipped_sum(torch.ones(2)).double(), exact.sum(0), rtol=1e-5, atol=1e-4)
        for method in METHODS:
            norm_sq = record.norm_sq(method)
            assert norm_sq.dtype == torch.float32
            assert_close(norm_sq.double(), norms_sq(exact), rtol=1e-5, atol=0)


def _double(record):
    if isinstance(record, OuterProduct):
        return OuterProduct(record.rows.double(), record.cols.double(), record.shape)
    if isinstance(record, EmbeddingRecord):
        return EmbeddingRecord(record.ids, record.values.double(), record.shape)
    return PerSampleGrad(record.gradient.double())


def test_norms_of_long_samples_are_not_inflated():
    """The norm must not exceed the rounding of the clipped sum: 32,768 incoherent positions, float32."""
    generator = torch.Generator().manual_seed(0)
    T = 32_768
    rows, cols, values = (torch.randn(2, T, 4, generator=generator) for _ in range(3))
    outer = OuterProduct(rows[:, None], cols[:, None], torch.Size([4, 4]))
    ids = torch.stack([torch.randperm(T, generator=generator) for _ in range(2)])
    gather = EmbeddingRecord(ids, values, torch.Size([T, 4]))
    exact = (rows.double().mT @ cols.double()).square().sum((1, 2))
    assert_close(outer.norm_sq(NormMethod.CHEAPEST).double(), exact, rtol=1e-3, atol=0)
    assert_close(gather.norm_sq(NormMethod.CHEAPEST).double(), values.double().square().sum((1, 2)), rtol=1e-3, atol=0)


def of_products(*sizes):
    """Small products of rows [4, G, T, R] and columns [4, G, T, C] by name, from their sizes G, T, R, C."""
    return {
        str(i): OuterProduct(randn(4, G, T, R), randn(4, G, T, C), torch.Size((G * R, C)))
        for i, (G, T, R, C) in enumerate(sizes)
    }


@pytest.mark.parametrize("method", list(NormMethod))
@pytest.mark.parametrize(
    ("records", "count"),
    [
        ({name: PerSampleGrad(randn(4, *shape)) for name, shape in (("a", (3,)), ("b", ()), ("c", (2, 5)))}, 1),
        (of_products((1, 5, 3, 4), (2, 5, 3, 4), (1, 5, 3, 4), (1, 6, 3, 4), (2, 5, 3, 4)), 3),
        (of_products(*[(1, 30, 9, 40)] * 100), 2),  # more bytes than one bundle may have
        (of_products((1, 1, 3, 4), (1, 1, 3, 4)) | {"bias": PerSampleGrad(randn(4, 3))}, 2),
    ],
    ids=["gradients", "products", "many products", "both"],
)
def test_bundles_are_as_good_as_their_parts(records, count, method):
    joined, sum_weight_B, nonfinite_B = [*bundles(records)], randn(4), torch.tensor([False, True, False, False])
    assert len(joined) == count
    assert {name for bundle in joined for name in bundle.shapes} == set(records)
    for bundle in joined:
        parts = {name: records[name] for name in bundle.shapes}
        exact = sum(norms_sq(record.per_sample()) for record in parts.values())
        assert_close(bundle.record.norm_sq(method), exact)
        sums, survivors = bundle.clipped_sums(sum_weight_B), bundle.without(nonfinite_B).clipped_sums(sum_weight_B)
        for name, record in parts.items():
            assert_close(sums[name], record.clipped_sum(sum_weight_B))
            assert_close(survivors[name], record.without(nonfinite_B).clipped_sum(sum_weight_B))
            assert sums[name].untyped_storage().nbytes() == sums[name].nbytes  # each becomes a gradient of its own


def test_products_of_a_bundle_round_alone():
    """The floor on rounding grows with the square of the positions, not of the products."""
    records = of_products(*[(1, 200, 3, 4)] * 60)
    records = {n: replace(r, rows=r.rows.float(), cols=r.cols.float()) for n, r in records.items()}
    (bundle,) = bundles(records)
    alone = sum(r.norm_sq(NormMethod.GHOST) for r in records.values())
    assert_close(bundle.record.norm_sq(NormMethod.GHOST), alone, rtol=1e-5, atol=0.0)


def test_sums_by_row_are_the_same_where_they_must_repeat(monkeypatch):
    ids = torch.tensor([[3, 1, 3, -1, 0], [0, 0, 2, 3, 2], [1, 1, 1, 1, 1]])
    sample, group = torch.tensor([2, 0, 2, 2, 0]), torch.tensor([0, 1, 1, 0, -1])
    records = [
        EmbeddingRecord(ids, randn(3, 5, 4), torch.Size((6, 4))),
        RoutedProduct(randn(5, 3), randn(5, 2), sample, group, 3, torch.Size((2, 3, 2))),
    ]
    gradients, factors = PerSampleGrad(randn(5, 2, 3)), torch.tensor([0.3, 0.0, 2.0], dtype=torch.float64)

    def figures():
        each = [(r.norm_sq(NormMethod.GHOST), r.per_sample(), r.clipped_sum(factors)) for r in records]
        return [*each, of_samples(gradients, sample, 3).per_sample()]

    expected = figures()
    for module in ("numerics", "embedding"):
        monkeypatch.setattr(f"dpshard.records.{module}.has_atomics", lambda device: True)
    assert_close(figures(), expected)
