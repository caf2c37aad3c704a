"""Compiled normals are those of numpy, to the last bits, with any number of threads."""

import numpy as np
import pytest
import torch

from dpshard.kernels import native
from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library
from dpshard.noise.keyed import KeyedGaussian, SumShard
from dpshard.randomness import UNIT, RandomSource, derive_keys

KEY = bytes(range(32))


@pytest.mark.parametrize(("dtype", "rows"), [(np.float32, 3), (np.float64, 4)])
def test_normals_are_those_of_the_formula(dtype, rows):
    """Against long doubles: random words, and extreme ones."""
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
    # u has rounding errors of eps; the radius, a root of -2 log u, magnifies them to eps / radius.
    allowed = 4 * eps * (radius + 1 / np.maximum(radius, np.sqrt(eps)))
    assert (abs(normals - expected) <= allowed[:, None]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_source_draws_what_numpy_would_make_of_its_bits(dtype, switch_off):
    def drawn():
        return np.concatenate([piece.copy() for piece in RandomSource(KEY).normals(5 * UNIT + 3, dtype)])

    compiled = drawn()
    switch_off()
    numpys = drawn()
    np.testing.assert_allclose(compiled, numpys, rtol=0, atol=np.sqrt(np.finfo(dtype).eps))
    assert np.quantile(abs(compiled - numpys), 0.99) < 10 * np.finfo(dtype).eps


KINDS = [(torch.float32, False, 1), (torch.float32, True, 4), (torch.float64, True, 1), (torch.float64, True, 4)]
ROWS = np.array([(0, 0, 9, 0, 18), (1, 5, 1203, 3, 1190), (2, 0, 1200, 1201, 2400), (2, 1250, 1201, 900, 1950)])
PIECES = native.Pieces([18, 1200, 2300], ROWS)


def exactly(keys, sizes):
    """Return streams with not one byte more."""
    return [RandomSource(key).words(-(-n // 8)).tobytes()[:n] for key, n in zip(keys, sizes, strict=True)]


def release_pieces(dtype, wide, summands):
    parts = [torch.linspace(-1, 1, n, dtype=dtype) for n in (18, 1200, 2300)]
    keys = derive_keys(KEY, ("stream",), [(i,) for i in range(len(ROWS) * summands)])
    native.release_pieces_(parts, PIECES, keys, 0.7, 3.0, wide=wide)
    return parts, keys


@pytest.mark.parametrize("built", ["with a cipher", "without a cipher", False])
@pytest.mark.parametrize(("dtype", "wide", "summands"), KINDS)
def test_pieces_get_the_bits_of_single_calls(dtype, wide, summands, built, switch_off, monkeypatch):
    if not built:
        switch_off()
    elif built == "without a cipher":
        monkeypatch.setattr(library(), "has_cipher", False)  # as on a processor without its instructions
        monkeypatch.setattr(reference, "streams", exactly)
    elif not library().has_cipher:
        pytest.skip("this processor has no instructions for the cipher")
    parts, keys = release_pieces(dtype, wide, summands)
    expected = [torch.linspace(-1, 1, len(part), dtype=dtype) for part in parts]
    rows, kind = (4, np.float64) if wide else (3, np.float32)
    for i, (part, first, half, lo, end) in enumerate(ROWS.tolist()):
        noise = 0
        for key in keys[i * summands : (i + 1) * summands]:
            words = RandomSource(key).words(rows * half).view(np.int32)[: rows * half]
            normals = np.empty((1, 2, half), kind)
            native.box_muller(words.reshape(1, rows, half).copy(), normals, np.empty((rows, 1, half), kind))
            noise = noise + normals.reshape(-1)[lo:end]
        noise = noise if summands == 1 else noise * 0.5
        native.release_(expected[part].numpy()[first : first + end - lo], noise, 0.7, 3.0)
    for got, wanted in zip(parts, expected, strict=True):
        assert torch.equal(got, wanted)


def test_threads_change_no_bit_of_pieces(set_threads):
    released = []
    for threads in (1, 3):
        set_threads(threads)
        released.append(torch.cat(release_pieces(torch.float32, True, 4)[0]))
    assert torch.equal(*released)


@pytest.mark.parametrize(
    "row", [(0, 1, 8, 0, 8), (0, 0, 8, 9, 17), (0, -1, 8, 0, 4), (0, 0, 8, 4, 4), (0, 0, 8, -1, 3)]
)
def test_pieces_outside_their_parts_are_refused(row):
    native.Pieces([8], np.array([(0, 0, 8, 8, 16)]))
    with pytest.raises(ValueError, match="No noise for pieces"):
        native.Pieces([8], np.array([row]))


@pytest.mark.parametrize(
    ("x", "keys"),
    [
        (torch.zeros(16)[::2], [KEY] * 2),
        (torch.zeros(9), [KEY] * 2),
        (torch.zeros(8, dtype=torch.float64), [KEY] * 2),
        (torch.zeros(8).half(), [KEY] * 2),
        (torch.zeros(8), []),
        (torch.zeros(8), [KEY] * 3),
        (torch.zeros(8), [KEY, KEY[:-1]]),
        (torch.zeros(8), [KEY] * 4),  # sums of several are float64
    ],
)
def test_parts_of_another_layout_and_other_keys_are_refused(x, keys):
    pieces = native.Pieces([8, 4], np.array([(0, 0, 8, 0, 8), (1, 0, 8, 4, 8)]))
    native.release_pieces_([torch.zeros(8), torch.zeros(4)], pieces, [KEY] * 2, 1.0, 1.0, wide=False)
    with pytest.raises(ValueError, match="No noise for these 2 tensors"):
        native.release_pieces_([x, torch.zeros(4, dtype=x.dtype)], pieces, keys, 1.0, 1.0, wide=False)


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
        KeyedGaussian(KEY, secure=secure).release_([SumShard("w", x)], step=0, std=2.0, divisor=3.0)
        released.append(x)
    assert torch.equal(released[0], released[1])
    assert torch.equal(released[0], released[2])


@pytest.mark.parametrize("secure", [False, True])
def test_a_release_is_the_same_without_it_to_the_last_bits(secure, switch_off):
    def released():
        shards = [
            SumShard("w", torch.linspace(-1, 1, 70_001)),
            SumShard("b", torch.ones(7)),
            SumShard("part", torch.ones(9), 5),
        ]
        KeyedGaussian(KEY, secure=secure).release_(shards, step=0, std=2.0, divisor=3.0)
        return [shard.local for shard in shards]

    compiled = released()
    switch_off()
    for ours, numpys in zip(compiled, released(), strict=True):
        torch.testing.assert_close(ours, numpys, rtol=1e-6, atol=1e-3)
        assert (ours - numpys).abs().quantile(0.99) < 1e-6
