"""Keys and sources of random numbers.

PITFALLS row 26: test_user_seeds_neither_change_nor_are_changed, test_every_part_of_the_context_and_secret_matters,
test_every_bit_of_a_philox_key_matters (a CPU torch.Generator would fail it), test_sources_are_uniform_and_normal.

Statistical tests run under fixed keys: they pass or fail for good, and a correct source fails under a random key with
probability FALSE_ALARM each.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpshard.errors import ConfigurationError
from dpshard.randomness import derive_key, new_run_secret, random_source

SECRET = bytes(range(32))
KEY = derive_key(SECRET, "test")
FALSE_ALARM = 1e-7

contexts = st.lists(st.text(max_size=5) | st.integers(), max_size=4)
both_sources = pytest.mark.parametrize("secure", [False, True])


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


@both_sources
def test_user_seeds_neither_change_nor_are_changed(secure):
    def seed_everything(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # what training scripts call
        random.seed(seed)

    def user_draws():
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    ours = []
    for seed in (0, 1):
        seed_everything(seed)
        expected = user_draws()
        seed_everything(seed)
        source = random_source(derive_key(SECRET, "noise", 7), secure=secure)
        ours.append(np.concatenate((source.normal(100, np.float64), source.uniform(100))))
        assert user_draws() == expected
    np.testing.assert_array_equal(*ours)


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 127])
def test_every_bit_of_a_philox_key_matters(bit):
    flipped = (int.from_bytes(KEY, "little") ^ (1 << bit)).to_bytes(32, "little")
    assert not np.array_equal(random_source(KEY).uniform(4), random_source(flipped).uniform(4))


@pytest.mark.parametrize("bit", [0, 128, 255])
def test_every_bit_of_a_secure_key_matters(bit):
    flipped = (int.from_bytes(KEY, "little") ^ (1 << bit)).to_bytes(32, "little")
    one, other = random_source(KEY, secure=True), random_source(flipped, secure=True)
    assert not np.array_equal(one.uniform(4), other.uniform(4))


@both_sources
def test_sources_are_uniform_and_normal(secure):
    uniform = random_source(KEY, secure=secure).uniform(200_000)
    assert uniform.min() > 0
    assert uniform.max() <= 1
    np.testing.assert_array_equal(uniform * 2.0**53, np.floor(uniform * 2.0**53))
    assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM
    for dtype in (np.float32, np.float64):
        normal = random_source(KEY, secure=secure).normal(200_001, dtype)
        assert normal.dtype == dtype
        assert normal.shape == (200_001,)
        assert stats.kstest(normal.astype(np.float64), "norm").pvalue > FALSE_ALARM
        # Neighbours: Box-Muller makes them in pairs, and a slip there (one angle, one radius) would correlate squares.
        pairs = normal[:-1].astype(np.float64).reshape(-1, 2)
        assert stats.pearsonr(pairs[:, 0], pairs[:, 1]).pvalue > FALSE_ALARM
        assert stats.pearsonr(pairs[:, 0] ** 2, pairs[:, 1] ** 2).pvalue > FALSE_ALARM


@both_sources
def test_uniform_never_is_zero_whatever_the_bits(secure, monkeypatch):
    source = random_source(KEY, secure=secure)
    if secure:
        monkeypatch.setattr("hashlib.shake_256", lambda _: type("Zeros", (), {"digest": staticmethod(bytes)}))
    else:
        monkeypatch.setattr(source, "_generator", type("Zeros", (), {"random": staticmethod(np.zeros)}))
    uniform = source.uniform(4)
    assert np.all((uniform > 0) & (uniform <= 1))


@both_sources
@given(n=st.integers(0, 50), more=st.integers(0, 50))
def test_first_values_do_not_depend_on_how_many_are_asked_for(secure, n, more):
    for dtype in (np.float32, np.float64):
        few = random_source(KEY, secure=secure).normal(n, dtype)
        many = random_source(KEY, secure=secure).normal(n + more, dtype)
        np.testing.assert_array_equal(few, many[:n])


@both_sources
def test_a_source_goes_on(secure):
    source = random_source(KEY, secure=secure)
    assert not np.intersect1d(source.uniform(1000), source.uniform(1000)).size
