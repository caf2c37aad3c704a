"""Keys and sources of random numbers.

Failure mode 26: test_user_seeds_neither_change_nor_are_changed, test_every_part_of_the_context_and_secret_matters,
test_every_bit_of_a_key_matters (a CPU torch.Generator would fail it), test_a_source_is_uniform_and_normal.

Statistical tests run under fixed keys: they pass or fail for good, and a correct source fails under a random key with
probability FALSE_ALARM each.
"""

import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpshard.errors import ConfigurationError
from dpshard.randomness import _CIPHER_PADDING, UNIT, RandomSource, derive_key, new_run_secret

SECRET = bytes(range(32))
KEY = derive_key(SECRET, "test")
FALSE_ALARM = 1e-7

contexts = st.lists(st.text(max_size=5) | st.integers(), max_size=4)


def random_bytes(source, n):
    return source._fill(np.empty(n + _CIPHER_PADDING, np.uint8))


def normal(source, n, dtype):
    return np.concatenate([np.empty(0, dtype), *(piece.copy() for piece in source.normals(n, dtype))])


def test_secrets_are_fresh():
    assert new_run_secret() != new_run_secret()
    assert len(new_run_secret()) == 32


@given(contexts, contexts)
def test_keys_are_equal_if_and_only_if_contexts_are(one, other):
    assert (derive_key(SECRET, *one) == derive_key(SECRET, *other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"), [(("a", "b"), ("ab",)), (("a", "b"), ("asb",)), ((1,), ("1",)), ((1, 2), (12,)), ((-1,), (1,))]
)
def test_every_part_of_the_context_and_secret_matters(one, other):
    assert derive_key(SECRET, *one) != derive_key(SECRET, *other)
    assert derive_key(SECRET, *one) != derive_key(bytes(32), *one)


def test_numpy_integers_are_integers():
    assert derive_key(SECRET, np.int64(3)) == derive_key(SECRET, 3)


def test_a_secret_of_another_length_is_refused():
    with pytest.raises(ConfigurationError, match="32 bytes"):
        derive_key(b"short", "noise")


def test_user_seeds_neither_change_nor_are_changed():
    def seed_everything(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # as in training scripts
        random.seed(seed)

    def user_draws():
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    ours = []
    for seed in (0, 1):
        seed_everything(seed)
        expected = user_draws()
        seed_everything(seed)
        source = RandomSource(derive_key(SECRET, "noise", 7))
        ours.append(np.concatenate((normal(source, 100, np.float64), source.uniform(100))))
        assert user_draws() == expected
    np.testing.assert_array_equal(*ours)


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 127, 128, 255])
def test_every_bit_of_a_key_matters(bit):
    flipped = (int.from_bytes(KEY, "little") ^ (1 << bit)).to_bytes(32, "little")
    assert not np.array_equal(RandomSource(KEY).uniform(4), RandomSource(flipped).uniform(4))


def test_the_stream_is_aes_256_in_counter_mode():
    """NIST SP 800-38D: block i of the stream is the cipher of i + 2; a nonce of zeros reserves 0 and 1 for the tag."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    assert random_bytes(RandomSource(key), 16).tobytes() == _encrypted(key, (2).to_bytes(16, "big"))
    longer = random_bytes(RandomSource(key), 2**19)
    assert longer[-16:].tobytes() == _encrypted(key, (2**15 + 1).to_bytes(16, "big"))


def _encrypted(key, block):
    return Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(block)


def test_normals_are_those_of_box_and_muller():
    """Against the formula in float64, word by word."""
    for dtype, words_a_pair, tolerance in ((np.float32, 3, 2e-6), (np.float64, 4, 1e-14)):
        w = np.frombuffer(random_bytes(RandomSource(KEY), 4 * words_a_pair * UNIT // 2), "<i4").reshape(
            words_a_pair, -1
        )
        magnitude = (w[:2] & 2**31 - 1).astype(np.float64)
        w = w.astype(np.float64)
        u = magnitude[0] * 2.0**-31 + (magnitude[1] + 0.5) * 2.0**-62
        angle = (w[2] + (w[3] * 2.0**-32 if words_a_pair == 4 else 0)) * np.pi * 2.0**-31
        radius = np.sqrt(-2 * np.log(u))
        expected = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
        drawn = normal(RandomSource(KEY), UNIT, dtype)
        # Near u = 1 the radius, a root of 1 - u, has half of u's digits.
        np.testing.assert_allclose(drawn, expected, rtol=tolerance, atol=np.sqrt(np.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("word", [0, -(2**31), 2**31 - 1, -1, -64])
def test_normals_are_finite_whatever_the_bits_and_reach_far_into_the_tails(dtype, word, monkeypatch):
    monkeypatch.setattr(
        RandomSource,
        "_fill",
        lambda _, buffer: np.full((len(buffer) - _CIPHER_PADDING) // 4, word, "<i4").view(np.uint8),
    )
    drawn = normal(RandomSource(KEY), 1024, dtype)
    assert np.isfinite(drawn).all()
    if word in (0, -(2**31)):
        assert abs(drawn).max() == pytest.approx(np.sqrt(2 * np.log(2.0**63)))


def test_a_source_is_uniform_and_normal():
    uniform = RandomSource(KEY).uniform(200_000)
    assert uniform.min() > 0
    assert uniform.max() <= 1
    np.testing.assert_array_equal(uniform * 2.0**53, np.floor(uniform * 2.0**53))
    assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM
    for dtype in (np.float32, np.float64):
        drawn = normal(RandomSource(KEY), 200_001, dtype)
        assert drawn.dtype == dtype
        assert drawn.shape == (200_001,)
        assert stats.kstest(drawn.astype(np.float64), "norm").pvalue > FALSE_ALARM
        far = int((abs(drawn) > 4).sum())
        assert stats.binomtest(far, len(drawn), 2 * stats.norm.sf(4)).pvalue > FALSE_ALARM
        for distance in (
            1,
            512,
            3584,
            2**16,
        ):  # pieces of several lengths may split partners, which would share an angle or a radius
            one, other = drawn[:-distance].astype(np.float64), drawn[distance:].astype(np.float64)
            assert stats.pearsonr(one, other).pvalue > FALSE_ALARM
            assert stats.pearsonr(one**2, other**2).pvalue > FALSE_ALARM


def test_uniform_never_is_zero_whatever_the_bits(monkeypatch):
    for octet in (0, 255):
        monkeypatch.setattr(
            RandomSource,
            "_fill",
            lambda _, buffer, octet=octet: np.full(len(buffer) - _CIPHER_PADDING, octet, np.uint8),
        )
        uniform = RandomSource(KEY).uniform(4)
        assert np.all((uniform > 0) & (uniform <= 1))


@given(n=st.integers(0, 5000), more=st.integers(0, 5000))
def test_first_values_do_not_depend_on_how_many_are_asked_for(n, more):
    for dtype in (np.float32, np.float64):
        few, many = normal(RandomSource(KEY), n, dtype), normal(RandomSource(KEY), n + more, dtype)
        np.testing.assert_array_equal(few, many[:n])


def test_a_source_goes_on():
    source = RandomSource(KEY)
    assert not np.intersect1d(source.uniform(1000), source.uniform(1000)).size
    one, other = normal(source, 1000, np.float64), normal(source, 1000, np.float64)
    assert not np.intersect1d(one, other).size
