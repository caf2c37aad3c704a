"""Compiled per-sample gradients of convolutions are those of autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard.config import NormMethod
from dpshard.kernels import native
from dpshard.kernels.native.library import load
from dpshard.records import Convolution, measure
from tests.kernels.native.support import build, by_hand, narrow_library


def images(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    """Return random images [B, k, C, *space], and output gradients of their convolution."""
    generator = torch.Generator().manual_seed(C * P)
    x = torch.randn(B, k, C, *space, generator=generator)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    y = convolve(x.flatten(0, 1), torch.zeros(P, C // groups, *kernel), None, stride, padding, dilation, groups)
    return x, torch.randn(B, k, *y.shape[1:], generator=generator)


def convolution(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    pair = images(B, k, C, P, space, kernel, stride, padding, dilation, groups)
    steps = ((n,) * len(space) if isinstance(n, int) else n for n in (stride, padding, dilation))
    return Convolution(*pair, torch.Size((P, C // groups, *kernel)), *steps, groups)


CONVOLUTIONS = {
    "plain": convolution(3, 1, 5, 16, (9, 8), (3, 3)),
    "padded, several images": convolution(2, 3, 4, 20, (7, 7), (3, 3), padding=1),
    "strided, dilated, grouped": convolution(2, 1, 6, 34, (13, 12), (3, 2), 2, 2, 3, groups=2),
    "one dimension": convolution(3, 1, 3, 9, (50,), (5,), 3, 2),
    "three dimensions": convolution(2, 2, 3, 17, (5, 6, 7), (2, 3, 2), (1, 2, 1), (1, 0, 1)),
    "three dimensions, no two alike": convolution(2, 1, 2, 16, (7, 6, 9), (2, 3, 2), (2, 1, 3), (1, 2, 0), (2, 1, 3)),
    "many positions": convolution(2, 1, 1, 16, (60, 50), (3, 3), padding=1),
    "one long line": convolution(2, 1, 1, 16, (5000,), (3,)),
    "windows that miss the end": convolution(2, 1, 3, 16, (10, 11), (3, 3), 4),
    "other strides": Convolution(
        *(x.to(memory_format=torch.channels_last_3d) for x in images(2, 3, 4, 16, (6, 6), (3, 3))),
        torch.Size((16, 4, 3, 3)),
        (1, 1),
        (0, 0),
        (1, 1),
        1,
    ),
}


def exact(record):
    """Return per-sample gradients in float64, by autograd."""
    out = []
    for x, g in zip(record.input.double(), record.gradient.double(), strict=True):
        kernel = torch.zeros(record.shape, dtype=torch.float64, requires_grad=True)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(record.stride) - 1]
        y = convolve(x, kernel, None, record.stride, record.padding, record.dilation, record.groups)
        out.append(torch.autograd.grad(y, kernel, g)[0])
    return torch.stack(out)


@pytest.mark.parametrize("record", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_gradients_of_convolutions_are_those_of_autograd(record, set_threads):
    assert record.size.by_native
    expected = exact(record)
    for threads in (1, 3):
        set_threads(threads)
        gradients = torch.full(expected.shape, torch.nan)
        norm_sq = native.per_sample_gradients_(gradients, record._images(), *record._steps())
        alone = native.gradient_norm_sq(record.shape, record._images(), *record._steps())
        largest = float(expected.abs().max())
        torch.testing.assert_close(gradients.double(), expected, rtol=0, atol=1e-5 * largest)
        torch.testing.assert_close(norm_sq.double(), expected.flatten(1).square().sum(1), rtol=1e-5, atol=0)
        assert torch.equal(alone, norm_sq)


@pytest.mark.parametrize("record", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_narrow_registers_make_the_same_gradients(record, tmp_path, monkeypatch):
    narrow, expected = narrow_library(tmp_path), exact(record)
    monkeypatch.setattr("dpshard.kernels.native.convolution.library", lambda: narrow)
    torch.testing.assert_close(record.per_sample().double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("method", [NormMethod.INSTANTIATE, NormMethod.GHOST, NormMethod.CHEAPEST])
@pytest.mark.parametrize("record", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_records_of_convolutions_are_the_same_without_it(record, method, switch_off):
    compiled = record.per_sample(), record.norm_sq(method), *record.instantiated()
    switch_off()
    assert not record.size.by_native
    for ours, theirs in zip(
        compiled, (record.per_sample(), record.norm_sq(method), *record.instantiated()), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_an_image_stays_with_its_sample(bad):
    record = convolution(3, 2, 4, 16, (6, 6), (3, 3), padding=1)
    record.input[1, 1, 2, 3, 4] = bad
    assert record.instantiated()[1].isfinite().tolist() == [True, False, True]
    assert record.norm_sq(NormMethod.INSTANTIATE).isfinite().tolist() == [True, False, True]


def test_products_of_convolutions_are_counted():
    record = convolution(3, 2, 4, 16, (6, 6), (3, 3), padding=1, groups=2)
    for work in (record.per_sample, lambda: record.norm_sq(NormMethod.INSTANTIATE)):
        with FlopCounterMode(display=False) as counter:
            work()
        assert counter.get_total_flops() == 3 * 2 * (2 * 36) * 16 * 2 * 9


def test_small_groups_large_volumes_and_other_dtypes_are_left_to_torch():
    cpu = torch.device("cpu")
    assert native.supports_convolution(cpu, torch.float32, 8, 100)
    assert not native.supports_convolution(cpu, torch.float32, 7, 100)
    assert not native.supports_convolution(cpu, torch.float32, 8, 10**6)
    assert not native.supports_convolution(cpu, torch.float64, 8, 100)
    assert not native.supports_convolution(torch.device("cuda"), torch.float32, 8, 100)
    record = convolution(2, 1, 3, 16, (6, 6), (3, 3))
    with pytest.raises(ValueError, match="has no gradient of convolutions"):
        native.gradient_norm_sq(record.shape, (record.input.double(), record.gradient), *record._steps())


def test_images_that_do_not_fit_are_refused():
    record = convolution(2, 1, 4, 16, (6, 6), (3, 3), groups=2)
    steps = record._steps()
    for x, g in ((record.input[:1], record.gradient), (record.input[..., :5], record.gradient)):
        with pytest.raises(ValueError, match="has no gradient of"):
            native.gradient_norm_sq(record.shape, (x, g), *steps)
    for gradients in (torch.empty(1, *record.shape), torch.empty(*record.shape, 2).movedim(4, 0)):
        with pytest.raises(ValueError, match="must be contiguous"):
            native.per_sample_gradients_(gradients, record._images(), *steps)


def test_a_thread_without_memory_is_noticed(tmp_path):
    no_memory = ("aligned_alloc(64, sizeof(float) * c->k * S * lanes)", "NULL")
    with pytest.raises(MemoryError, match="output gradients of 2 samples"):
        load(build(tmp_path, convolution=no_memory))


def test_the_rounding_of_long_sums_over_channels_does_not_grow():
    """The same as a convolution of two pixels, from which the Gram matrix of pixels is made."""
    x = torch.randn(2, 1, 64, 1, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 1, 2)
    x[..., 1] *= -1
    g = torch.full((2, 1, 150528, 2), 1.3)
    g[..., 1] *= 1.05
    for pair in ((x, g), (g, x)):
        record = Convolution(*pair, torch.Size((pair[1].shape[2], pair[0].shape[2], 1)), (1,), (0,), (1,), 1)
        assert record.size.gram_by_pixels
        (norm_sq, exact) = record.norm_sq(NormMethod.GHOST), by_hand(x.mT, g.mT)[0].sum(1)
        assert bool((norm_sq.double() / exact).sub(1).abs().max() < 0.03)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_long_line_adds_no_more_than_its_threshold(compiled, switch_off):
    """65,000 constants nearly cancel: the sum must use the measured gradients, which are not kept."""
    if not compiled:
        switch_off()
    n = 65000
    x, g = torch.full((2, 1, 1, n + 1), 1.3), torch.full((2, 1, 16, n), 0.7)
    g[..., n // 2 :] *= -(1 + 6 * 2**-13)
    record = Convolution(x, g, torch.Size((16, 1, 2)), (1,), (0,), (1,), 1)
    norm_sq, (left,) = measure([record], NormMethod.CHEAPEST, keep=False)
    added = left.clipped_sum(torch.tensor([1.0, 0.0])).norm()
    assert 0.1 < float(added / norm_sq[0].sqrt()) < 1.01


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        pair, steps = (torch.empty(3, 1, 2, 9, 9), torch.empty(3, 1, 20, 7, 7)), ((1, 1), (0, 0), (1, 1))
        made = native.per_sample_gradients_(torch.empty(3, 20, 2, 3, 3), pair, *steps)
        alone = native.gradient_norm_sq((20, 2, 3, 3), pair, *steps)
    assert made.shape == alone.shape == (3,)
