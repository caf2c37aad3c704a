"""Compiled code does what numpy and torch do in its place, to the last bits, with any number of threads."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dpshard import PrivacyEngine, native
from dpshard.config import NormMethod
from dpshard.native.library import library, load, team
from dpshard.noise import KeyedGaussian, Shard
from dpshard.randomness import UNIT, RandomSource, first_normals
from dpshard.rules.records import Convolution, OuterProduct, measure


def images(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    """Random images [B, k, C, *space], and output gradients of their convolution."""
    generator = torch.Generator().manual_seed(C * P)
    x = torch.randn(B, k, C, *space, generator=generator)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    y = convolve(x.flatten(0, 1), torch.zeros(P, C // groups, *kernel), None, stride, padding, dilation, groups)
    return x, torch.randn(B, k, *y.shape[1:], generator=generator)


def convolution(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    pair = images(B, k, C, P, space, kernel, stride, padding, dilation, groups)
    steps = ((n,) * len(space) if isinstance(n, int) else n for n in (stride, padding, dilation))
    return Convolution(*pair, torch.Size((P, C // groups, *kernel)), *steps, groups)


SOURCES = Path(native.__file__).parent

KEY = bytes(range(32))

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without a C compiler the package is installed without compiled code"
)


@pytest.fixture
def switch_off(monkeypatch):
    def switch_off():
        monkeypatch.setenv("DPSHARD_NATIVE", "0")
        library.cache_clear()

    yield switch_off
    library.cache_clear()


def build(path, **changed):
    """A library of the sources, some of them changed, at `path`."""
    for source in (*SOURCES.glob("*.c"), *SOURCES.glob("*.h")):
        (path / source.name).write_text(source.read_text())
    for name, (right, wrong) in changed.items():
        (source,) = path.glob(f"{name}.[ch]")
        text = source.read_text()
        assert right in text
        source.write_text(text.replace(right, wrong))
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", path / "built.so", *path.glob("*.c"), "-lm"]
    subprocess.run(command, check=True)
    return str(path / "built.so")


@pytest.fixture
def set_threads():
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


def test_it_is_built_with_the_package():
    assert native.is_built()


def test_threads_are_those_of_torch():
    address, threads = team()
    assert address
    assert threads == torch.get_num_threads()


def test_a_variable_switches_it_off():
    program = "from dpshard import native; print(native.is_built())"
    for value, built in (("0", "False"), ("1", "True")):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={"DPSHARD_NATIVE": value}, check=True
        )
        assert done.stdout.strip() == built


@pytest.mark.parametrize("source", ["int other(void) { return 1; }", "int dpshard_interface(void) { return 0; }", None])
def test_a_library_of_another_version_or_none_at_all_is_not_called(source, tmp_path):
    built = tmp_path / "library.so"
    if source is None:
        built.write_bytes(b"not a library")
    else:
        (tmp_path / "source.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", built, tmp_path / "source.c"], check=True)
    with pytest.warns(UserWarning, match=r"library\.so cannot be used.*Install dpshard again"):
        assert load(str(built)) is None


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("normals", "(wide)x[i] + std", "(wide)x[i] + 0"),
        ("normals", "2.0f / 3 ", "2.0f / 4 "),
        ("normals", "2.0 / 3 ", "2.0 / 4 "),
        ("normals", "quarter & 2 ?", "quarter & 1 ?"),
        ("normals", "/ divisor;", ";"),
        ("gram", "sum[l] += 2 *", "sum[l] +="),
        ("gram", "k, start > 0)", "k, 0)"),
        ("gram", "start < of->n;", "start < of->n && start < 512;"),
        ("gram", "while (j > i)", "if (j > i)"),
        ("gram", "* of->g", "* 0"),
        ("gram", "x + j * of->t", "x + i * of->t"),
        ("gram", "roots += ", "roots = "),
        ("convolution", "*(vector *)(out[j] + p * WIDTH) +=", "*(vector *)(out[j] + p * WIDTH) ="),
        ("convolution", "i < c->k; i++)\n            pack", "i < 1; i++)\n            pack"),
        ("convolution", "x * c->dilation[2]", "x"),
        ("convolution", "z * c->dilation[0]", "z"),
        ("convolution", "* c->stride[0]", "* c->stride[1]"),
        ("convolution", "y + p[1]", "y"),
        ("convolution", "!= last)", "== last)"),
        ("convolution", "squares[l] +=", "squares[l] ="),
        ("convolution", "+ first) * S, n, S)", ") * S, n, S)"),
        ("normalization", "weights[k] += some_weights[k]", "weights[k] = some_weights[k]"),
        ("normalization", "biases[k] += some_biases[k]", "biases[k] = some_biases[k]"),
        ("normalization", "(x[k] - mean)", "x[k]"),
        ("normalization", "+ layer->eps", "+ 0"),
        ("normalization", "layer->centered ?", "1 ?"),
        ("normalization", "total.product +=", "total.product ="),
        ("normalization", "total.sum +=", "total.sum ="),
        ("normalization", "over(lanes) + sum", "over(lanes)"),
        ("normalization", "over(products) + product", "over(products)"),
        ("normalization", "(float)(total.product * scale)", "(float)total.product"),
        ("normalization", "g = layer->g + piece * rows * N", "g = layer->g"),
    ],
)
def test_a_build_that_computes_wrongly_is_not_used(source, right, wrong, tmp_path):
    """Noise that is dropped, a wrong logarithm, a wrong sign, no batch size; parts of a norm or a gradient left out."""
    built = build(tmp_path, **{source: (right, wrong)})
    with pytest.warns(
        UserWarning, match="it (draws noise|takes norms|differentiates (convolutions|normalisations)) wrongly"
    ):
        assert load(built) is None


@pytest.mark.parametrize(("dtype", "rows"), [(np.float32, 3), (np.float64, 4)])
def test_normals_are_those_of_the_formula(dtype, rows):
    """Against long doubles: random words, and those at which something may happen."""
    units, n = 3, 4096
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (units, rows + 1, n)).astype(np.int32)[:, :rows]
    edges = [0, 1, -1, 63, -(2**31), 1 - 2**31, 2**31 - 1]
    axes = [sign * quarter * 2**29 + d for sign in (-1, 1) for quarter in (1, 2, 3) for d in (-1, 0, 1)]
    special = np.array([*edges, *axes], np.int64)
    grid = np.stack(np.meshgrid(edges, edges, special), -1).reshape(-1, 3)
    words[1, :3, : len(grid)] = grid.T
    normals = np.full((units, 2, n), np.nan, dtype)
    native.box_muller(words, normals, np.empty((rows, units, n), dtype))

    two_pi, exact = np.longdouble("6.28318530717958647692528676655900577"), words.astype(np.longdouble)
    coarse, fine = (words[:, :2] & 2**31 - 1).astype(np.longdouble).swapaxes(0, 1)
    u = (coarse + (fine + np.longdouble(0.5)) * np.longdouble(2) ** -31) * np.longdouble(2) ** -31
    turns = exact[:, 2] * np.longdouble(2) ** -32 + (exact[:, 3] * np.longdouble(2) ** -64 if rows == 4 else 0)
    radius = np.sqrt(-2 * np.log(u))
    expected = np.stack((radius * np.cos(two_pi * turns), radius * np.sin(two_pi * turns)), 1)
    eps = np.finfo(dtype).eps
    # u has rounding errors of eps, of which the radius, a root of -2 log u, takes up eps / radius.
    allowed = 4 * eps * (radius + 1 / np.maximum(radius, np.sqrt(eps)))
    assert (abs(normals - expected) <= allowed[:, None]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_source_draws_what_numpy_would_make_of_its_bits(dtype, switch_off):
    def drawn():
        pieces = [piece.copy() for piece in RandomSource(KEY).normals(5 * UNIT + 3, dtype)]
        return np.concatenate(pieces), np.stack([row.copy() for row in first_normals([KEY, KEY[::-1]], 2048, dtype)])

    compiled = drawn()
    switch_off()
    for ours, numpys in zip(compiled, drawn(), strict=True):
        np.testing.assert_allclose(ours, numpys, rtol=0, atol=np.sqrt(np.finfo(dtype).eps))
        assert np.quantile(abs(ours - numpys), 0.99) < 10 * np.finfo(dtype).eps


@pytest.mark.parametrize(("x_dtype", "noise_dtype"), [("f4", "f4"), ("f4", "f8"), ("f8", "f8")])
def test_a_sum_is_released_as_numpy_would(x_dtype, noise_dtype):
    rng = np.random.default_rng(1)
    x, noise = rng.normal(size=50_001).astype(x_dtype), rng.normal(size=50_001).astype(noise_dtype)
    expected = (x + np.dtype(noise_dtype).type(0.7) * noise).astype(x_dtype) / np.dtype(x_dtype).type(3.0)
    native.release_(x, noise, 0.7, 3.0)
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("secure", [False, True])
def test_threads_change_no_bit(secure, set_threads):
    released = []
    for threads in (1, 2, 5):
        set_threads(threads)
        x = torch.linspace(-1, 1, 300_001)
        KeyedGaussian(KEY, secure=secure).release_([Shard("w", x)], step=0, std=2.0, divisor=3.0)
        released.append(x)
    assert torch.equal(released[0], released[1])
    assert torch.equal(released[0], released[2])


@pytest.mark.parametrize("secure", [False, True])
def test_a_release_is_the_same_without_it_to_the_last_bits(secure, switch_off):
    def released():
        shards = [Shard("w", torch.linspace(-1, 1, 70_001)), Shard("b", torch.ones(7)), Shard("part", torch.ones(9), 5)]
        KeyedGaussian(KEY, secure=secure).release_(shards, step=0, std=2.0, divisor=3.0)
        return [shard.local for shard in shards]

    compiled = released()
    switch_off()
    for ours, numpys in zip(compiled, released(), strict=True):
        torch.testing.assert_close(ours, numpys, rtol=1e-6, atol=1e-3)
        assert (ours - numpys).abs().quantile(0.99) < 1e-6


def product(B, G, T, R, C):
    generator = torch.Generator().manual_seed(T)
    return (torch.randn(B, G, T, n, generator=generator) for n in (R, C))


def by_hand(rows, cols):
    """Squared norms, and the squares of the sums that rounding is relative to, in float64."""
    rows, cols = rows.double(), cols.double()
    gradients = torch.einsum("bgtr,bgtc->bgrc", rows, cols)
    return gradients.square().sum((1, 2, 3)), (rows.norm(dim=3) * cols.norm(dim=3)).sum((1, 2)).square()


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
            ours = native.ghost_norm_sq(*pair, floor)
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


def narrow_library(path):
    narrow = load(build(path, tiles=('__builtin_cpu_supports("avx512f")', "0")))
    assert narrow is not None
    if not narrow.has_tiles:
        pytest.skip("this processor has no AVX2")
    return narrow


@pytest.mark.parametrize("size", SIZES)
def test_narrow_registers_give_the_same_norms(size, tmp_path):
    """Those of a processor without AVX-512, as most have been built."""
    narrow = narrow_library(tmp_path)
    rows, cols = product(*size)
    norm_sq, scale_sq = by_hand(rows, cols)
    out, vectors = torch.empty(size[0]), [(x.data_ptr(), x.stride()) for x in (rows, cols)]
    for floor, exact in ((0.0, norm_sq), (1.0, scale_sq)):
        narrow.ghost_norms(*vectors, size, floor, out.data_ptr(), team())
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=0)


def test_threads_and_other_samples_change_no_bit_of_a_norm(set_threads):
    rows, cols = product(5, 2, 200, 30, 20)
    norms = []
    for threads in (1, 2, 7):
        set_threads(threads)
        norms.append(torch.stack([native.ghost_norm_sq(rows, cols, floor) for floor in (0.0, 1.0)]))
    alone = [
        torch.stack([native.ghost_norm_sq(rows[i : i + 1], cols[i : i + 1], floor) for floor in (0.0, 1.0)])
        for i in range(5)
    ]
    assert all(torch.equal(norms[0], others) for others in (*norms[1:], torch.cat(alone, 1)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_sample(bad):
    rows, cols = product(3, 1, 40, 9, 8)
    rows[1, 0, 17, 3] = bad
    for floor in (0.0, 1e-4, 1.0):
        assert native.ghost_norm_sq(rows, cols, floor).isfinite().tolist() == [True, False, True]


def test_norms_of_nothing_are_zeros():
    for size in ((2, 1, 0, 3, 4), (2, 1, 3, 0, 4), (0, 1, 3, 4, 5)):
        assert torch.equal(native.ghost_norm_sq(*product(*size), 1.0), torch.zeros(size[0]))


def test_records_take_it_for_float32_and_give_the_same_norms_without(switch_off):
    rows, cols = product(4, 2, 70, 30, 20)
    wide = OuterProduct(rows.double(), cols.double(), torch.Size((60, 20)))
    record = OuterProduct(rows, cols, torch.Size((60, 20)))
    assert native.takes_ghost_norm(rows.device, rows.dtype)
    assert not native.takes_ghost_norm(rows.device, torch.float64)
    assert not native.takes_ghost_norm(torch.device("meta"), rows.dtype)
    compiled = record.norm_sq(NormMethod.GHOST)
    switch_off()
    assert not native.takes_ghost_norm(rows.device, rows.dtype)
    torch.testing.assert_close(compiled, record.norm_sq(NormMethod.GHOST))
    torch.testing.assert_close(compiled.double(), wide.norm_sq(NormMethod.GHOST), rtol=1e-5, atol=0)


@pytest.mark.parametrize("T", [1, 8, 9, 16, 65, 128])
def test_products_are_counted_as_tiles_of_half_a_matrix(T):
    pairs = sum(16 * 8 for left in range(0, T, 16) for top in range(left, T, 8))
    with FlopCounterMode(display=False) as counter:
        native.ghost_norm_sq(*product(3, 2, T, 5, 7), 0.0)
    assert counter.get_total_flops() == 3 * 2 * pairs * 2 * (5 + 7)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("n", [1000, 8192, 50257, 150528])
def test_the_rounding_of_long_sums_does_not_grow(n, compiled, switch_off):
    """Two positions of constants that nearly cancel: errors of the same sign, in sums as long as a vocabulary."""
    if not compiled:
        switch_off()
    rows = torch.randn(3, 1, 2, 64, generator=torch.Generator().manual_seed(n))
    rows[:, :, 1] = -rows[:, :, 0]
    cols = torch.full((3, 1, 2, n), 1.3)
    cols[:, :, 1] *= 1.05
    norm_sq = OuterProduct(rows, cols, torch.Size((64, n))).norm_sq(NormMethod.GHOST)
    exact, _ = by_hand(rows, cols)
    assert bool((norm_sq.double() / exact).sub(1).abs().max() < 0.03)


def test_the_rounding_of_long_sums_over_channels_does_not_grow():
    """The same, as a convolution of two pixels, of which the Gram matrix of pixels is made."""
    x = torch.randn(2, 1, 64, 1, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 1, 2)
    x[..., 1] *= -1
    g = torch.full((2, 1, 150528, 2), 1.3)
    g[..., 1] *= 1.05
    for pair in ((x, g), (g, x)):
        record = Convolution(*pair, torch.Size((pair[1].shape[2], pair[0].shape[2], 1)), (1,), (0,), (1,), 1)
        assert record.size.gram_by_pixels
        (norm_sq, exact) = record.norm_sq(NormMethod.GHOST), by_hand(x.mT, g.mT)[0]
        assert bool((norm_sq.double() / exact).sub(1).abs().max() < 0.03)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_long_line_adds_no_more_than_its_threshold(compiled, switch_off):
    """65,000 constants that nearly cancel: what is summed has to be what was measured, and is not kept."""
    if not compiled:
        switch_off()
    n = 65000
    x, g = torch.full((2, 1, 1, n + 1), 1.3), torch.full((2, 1, 16, n), 0.7)
    g[..., n // 2 :] *= -(1 + 6 * 2**-13)
    record = Convolution(x, g, torch.Size((16, 1, 2)), (1,), (0,), (1,), 1)
    norm_sq, (left,) = measure([record], NormMethod.CHEAPEST, keep=False)
    added = left.clipped_sum(torch.tensor([1.0, 0.0])).norm()
    assert 0.1 < float(added / norm_sq[0].sqrt()) < 1.01


def test_products_that_overflow_only_when_doubled_do_not():
    rows, cols = torch.full((1, 1, 32, 1), 1.4e19), torch.full((1, 1, 32, 3), 1e-19)
    norm_sq = native.ghost_norm_sq(rows, cols, 0.0)
    torch.testing.assert_close(norm_sq.double(), by_hand(rows, cols)[0], rtol=1e-5, atol=0)


def test_other_dtypes_and_sizes_are_refused():
    rows, cols = product(2, 1, 5, 3, 4)
    for pair in ((rows.double(), cols), (rows, cols.double()), (rows, cols[:1]), (rows[:, :, :4], cols)):
        with pytest.raises(ValueError, match="No ghost norm"):
            native.ghost_norm_sq(*pair, 0.0)


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        norm_sq = native.ghost_norm_sq(torch.empty(3, 2, 70, 5), torch.empty(3, 2, 70, 7), 0.0)
        images = torch.empty(3, 1, 2, 9, 9), torch.empty(3, 1, 20, 7, 7)
        steps = (1, 1), (0, 0), (1, 1)
        made = native.per_sample_gradients_(torch.empty(3, 20, 2, 3, 3), images, *steps)
        alone = native.gradient_norm_sq((20, 2, 3, 3), images, *steps)
    assert norm_sq.shape == made.shape == alone.shape == (3,)


# --- convolutions -----------------------------------------------------------------------------------------------------

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
    """Per-sample gradients in float64, by autograd."""
    out = []
    for x, g in zip(record.input.double(), record.gradient.double(), strict=True):
        kernel = torch.zeros(record.shape, dtype=torch.float64, requires_grad=True)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(record.stride) - 1]
        y = convolve(x, kernel, None, record.stride, record.padding, record.dilation, record.groups)
        out.append(torch.autograd.grad(y, kernel, g)[0])
    return torch.stack(out)


@pytest.mark.parametrize("record", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_gradients_of_convolutions_are_those_of_autograd(record, set_threads):
    assert record.size.tiles
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
    monkeypatch.setattr("dpshard.native.convolution.library", lambda: narrow)
    torch.testing.assert_close(record.per_sample().double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("method", [NormMethod.INSTANTIATE, NormMethod.GHOST, NormMethod.CHEAPEST])
@pytest.mark.parametrize("record", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_records_of_convolutions_are_the_same_without_it(record, method, switch_off):
    compiled = record.per_sample(), record.norm_sq(method), *record.instantiated()
    switch_off()
    assert not record.size.tiles
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
    assert native.takes_convolution(cpu, torch.float32, 8, 100)
    assert not native.takes_convolution(cpu, torch.float32, 7, 100)
    assert not native.takes_convolution(cpu, torch.float32, 8, 10**6)
    assert not native.takes_convolution(cpu, torch.float64, 8, 100)
    assert not native.takes_convolution(torch.device("cuda"), torch.float32, 8, 100)
    record = convolution(2, 1, 3, 16, (6, 6), (3, 3))
    with pytest.raises(ValueError, match="No gradients of convolutions"):
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
    no_memory = ("aligned_alloc(64, sizeof(float) * c->k * S * LANES)", "NULL")
    with pytest.raises(MemoryError, match="output gradients of 2 samples"):
        load(build(tmp_path, convolution=no_memory))


# --- normalisation layers ---------------------------------------------------------------------------------------------

NORMALIZATIONS = {
    "rows": (0, (3, 7, 33)),
    "many rows": (0, (2, 1000, 5)),
    "one row": (0, (1, 1, 3000)),
    "channels": (2, (3, 6, 40)),
    "channels alone": (5, (2, 5, 7)),
    "all channels": (1, (2, 3, 5000)),
    "no space": (2, (3, 8, 1)),
}


def differentiated(x, gradient, groups, centered):
    """Gradients of weights and biases in float64, by autograd."""
    made = []
    for row, g in zip(x.double(), gradient.double(), strict=True):
        n = len(row) if groups else row.shape[1]
        weight, bias = (torch.full((n,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
        together = row.reshape(groups, -1) if groups else row
        normalize = F.layer_norm if centered else F.rms_norm
        normalized = normalize(together, together.shape[1:], eps=1e-3).view(row.shape)
        y = normalized * weight.view(-1, *[1] * bool(groups)) + bias.view(-1, *[1] * bool(groups))
        made.append(torch.stack(torch.autograd.grad(y, (weight, bias), g)))
    return torch.stack(made, 1)


def layer(shape):
    generator = torch.Generator().manual_seed(shape[2])
    return torch.randn(shape, generator=generator) * 3 + 5, torch.randn(shape, generator=generator) + 1


@pytest.mark.parametrize(("groups", "shape"), NORMALIZATIONS.values(), ids=NORMALIZATIONS.keys())
@pytest.mark.parametrize("centered", [True, False])
def test_gradients_of_normalisations_are_those_of_autograd(groups, shape, centered, set_threads):
    x, gradient = layer(shape)
    expected, made = differentiated(x, gradient, groups, centered), []
    for threads in (1, 3):
        set_threads(threads)
        strided = torch.stack((x, x), -1)[..., 0], gradient.mT.contiguous().mT
        pairs = (x, gradient), strided
        made += [native.normalization_gradients(*pair, groups, 1e-3, centered=centered) for pair in pairs]
    largest = expected.abs().amax((1, 2), keepdim=True)
    torch.testing.assert_close(made[0] / largest, expected / largest, rtol=0, atol=1e-5, check_dtype=False)
    assert all(torch.equal(made[0], other) for other in made[1:])
    alone = native.normalization_gradients(x[-1:], gradient[-1:], groups, 1e-3, centered=centered)
    assert torch.equal(alone[:, 0], made[0][:, -1])


@pytest.mark.parametrize("groups", [0, 1])
def test_sums_over_large_images_do_not_stop_growing(groups):
    """As one sum in single precision does at 2^24."""
    n = 2**25
    x, gradient = torch.tensor([0.5, 1.5]).repeat(n // 2).view((-1, 2) if not groups else (1, -1))[None], torch.ones(())
    made = native.normalization_gradients(x, gradient.expand(x.shape), groups, 0.0, centered=True)
    of_bias = float(made[1].sum())
    assert of_bias == pytest.approx(n, rel=1e-6)
    made = native.normalization_gradients(x, x - 1, groups, 0.0, centered=True)
    assert made[0].abs().sum().item() == pytest.approx(n / 2, rel=1e-6)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_a_layer_stays_with_its_sample(groups, bad):
    for place in (0, 1):
        pair = layer((3, 4, 4))
        pair[place][1, 2, 3] = bad
        made = native.normalization_gradients(*pair, groups, 1e-3, centered=True)
        assert made.isfinite().all((0, 2)).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(8),
        nn.LayerNorm((3, 8), eps=0.1),
        nn.LayerNorm(8, bias=False),
        nn.RMSNorm(8),
        nn.RMSNorm(8, eps=0.1),
        nn.GroupNorm(3, 6, eps=0.1),
        nn.InstanceNorm1d(6, affine=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_layers_are_the_same_without_it(module, dtype, switch_off):
    x = torch.randn(4, 6, 3, 8, generator=torch.Generator().manual_seed(0))
    x = (x if isinstance(module, nn.LayerNorm | nn.RMSNorm) else x.flatten(2)).to(dtype)

    def clipped(trained):
        model = copy.deepcopy(module).to(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        settings = {"batch_size": 4, "sample_size": 100, "epochs": 1, "noise_multiplier": 0.0, "max_grad_norm": 0.7}
        engine = PrivacyEngine(model, **settings)
        model(x).square().flatten(1).mean(1).mean().backward()
        engine.privatize()
        return [p.grad for p in model.parameters() if p.requires_grad]

    names = [name for name, _ in module.named_parameters()]
    trained = [[name] for name in names] + [names]
    compiled = [clipped(some) for some in trained]
    switch_off()
    for some, gradients in zip(trained, compiled, strict=True):
        for ours, torchs in zip(gradients, clipped(some), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_other_layers_are_refused():
    x, gradient = layer((3, 4, 4))
    for pair, groups in (((x.double(), gradient), 0), ((x, gradient[:2]), 0), ((x, gradient), 3), ((x[0], x[0]), 0)):
        with pytest.raises(ValueError, match="No gradients of a normalisation"):
            native.normalization_gradients(*pair, groups, 1e-3, centered=True)
    assert not native.takes_normalization(x.device, torch.float64)
    assert not native.takes_normalization(torch.device("meta"), torch.float32)
    assert native.normalization_gradients(x[:0], gradient[:0], 0, 1e-3, centered=True).shape == (2, 0, 4)
    with FakeTensorMode():
        fake = torch.empty(3, 6, 8), torch.empty(3, 6, 8)
        assert native.normalization_gradients(*fake, 0, 1e-3, centered=True).shape == (2, 3, 8)
        assert native.normalization_gradients(*fake, 2, 1e-3, centered=True).shape == (2, 3, 6)
