"""Noise by the element, as accelerators draw it; here on the CPU.

Failure modes: 14 and 15 test_noise_of_an_accelerator_does_not_depend_on_the_split; 24 test_words.
Statistical tests have a fixed seed; correct noise fails under a random one with probability FALSE_ALARM each.
"""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.testing import assert_close

from dpshard.kernels.philox import HALF, philox, standard_normals
from dpshard.noise.keyed import BLOCK, KeyedGaussian
from dpshard.randomness import derive_key
from tests.noise.sampled import sampled

FALSE_ALARM = 1e-7
WORD = 2**32
SEVEN = (7, 0, 0)
"""A stream."""


def by_hand(counter, key):
    """Philox 4x32-10 in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(c[0] * 0xD2511F53, WORD)
        high_2, low_2 = divmod(c[2] * 0xCD9E8D57, WORD)
        c = [high_2 ^ c[1] ^ k[0], low_2, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def test_the_plain_integers_are_right():
    """Known answers of Random123, the authors' code."""
    ones, pi = [WORD - 1] * 6, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    assert by_hand([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert by_hand(ones[:4], ones[4:]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert by_hand(pi[:4], pi[4:]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


STREAMS = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)


@given(stream=STREAMS, counter=st.integers(0, WORD - 1))
def test_words(stream, counter):
    words = [int(word) for word in philox(stream, torch.tensor([counter]))]
    key, low, high = (number % 2**64 for number in stream)
    assert words == by_hand([counter, low % WORD, low // WORD, high % WORD], [key % WORD, key // WORD])


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 5 * HALF), min_size=2, max_size=2))
def test_a_part_is_the_part_of_the_whole(stream, cuts):
    start, stop = sorted(cuts)
    assert torch.equal(standard_normals(stream, start, stop), standard_normals(stream, 0, 5 * HALF)[start:stop])


@pytest.mark.parametrize("other", [(8, 1, 2), (7, 2, 2), (7, 1 + 2**32, 2), (7, 1, 3)])
def test_every_word_of_a_stream_gives_other_noise(other):
    n = 2**14
    one, two = (standard_normals(stream, 0, n).numpy() for stream in ((7, 1, 2), other))
    assert stats.pearsonr(one, two).pvalue > FALSE_ALARM
    assert stats.pearsonr(one**2, two**2).pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals(dtype):
    n = 2**18
    normals = standard_normals(SEVEN, 0, n, dtype).double().numpy()
    assert FALSE_ALARM / 2 < stats.chi2.cdf(float((normals**2).sum()), n) < 1 - FALSE_ALARM / 2
    assert stats.kstest(normals, "norm").pvalue > FALSE_ALARM
    for lag in (1, HALF, 2 * HALF):
        assert stats.pearsonr(normals[:-lag], normals[lag:]).pvalue > FALSE_ALARM
        assert stats.pearsonr(normals[:-lag] ** 2, normals[lag:] ** 2).pvalue > FALSE_ALARM
    assert stats.pearsonr(normals, standard_normals((8, 0, 0), 0, n).numpy()).pvalue > FALSE_ALARM
    assert_close(standard_normals(SEVEN, 0, n), torch.from_numpy(normals).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("word", "radius"), [(0, (2 * 63 * 0.6931471805599453) ** 0.5), (WORD - 1, 0.0)])
def test_the_smallest_and_the_largest_words_are_finite(dtype, word, radius):
    """Tails reach 9.3 standard deviations."""
    words = [torch.full((HALF,), word), torch.full((HALF,), word), *[torch.zeros(HALF, dtype=torch.int64)] * 2]
    with mock.patch("dpshard.kernels.philox.philox", return_value=words):
        normals = standard_normals(SEVEN, 0, 2 * HALF, dtype)
    assert_close(normals[:HALF].double(), torch.full((HALF,), radius).double(), rtol=1e-6, atol=1e-4)
    assert_close(normals[HALF:], torch.zeros(HALF, dtype=dtype))


@pytest.fixture
def accelerator():
    """Give CPU tensors the noise of an accelerator."""
    with mock.patch.object(KeyedGaussian, "_draws_on_cpu", lambda self, device: self.secure):
        yield KeyedGaussian(bytes(range(32)))


def test_noise_of_an_accelerator_does_not_depend_on_the_split(accelerator):
    start, stop = BLOCK - 3000, BLOCK + 2500
    whole = sampled(accelerator, 3, "w", start, stop)
    cuts = (start, start + 7, BLOCK - 1024, BLOCK + 1, stop)
    parts = [sampled(accelerator, 3, "w", a, b) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(sampled(accelerator, 3, "w", start, stop), whole)
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    accelerator.add_(image, step=3, name="w", std=1.0)
    assert torch.equal(image.flatten(), sampled(accelerator, 3, "w", 0, 120))


def test_noise_of_an_accelerator_has_a_key_for_every_purpose(accelerator):
    n = 2**16
    one = sampled(accelerator, 0, "w", 0, n).numpy()
    for step, name, start, secret in ((1, "w", 0, 1), (0, "v", 0, 1), (0, "w", BLOCK, 1), (0, "w", 0, 2)):
        gaussian = accelerator if secret == 1 else KeyedGaussian(bytes(32))
        other = sampled(gaussian, step, name, start, start + n).numpy()
        assert stats.pearsonr(one, other).pvalue > FALSE_ALARM
        assert stats.pearsonr(one**2, other**2).pvalue > FALSE_ALARM


def test_the_stream_of_a_block_has_160_bits_of_its_key(accelerator):
    key = derive_key(accelerator.secret, "noise", 3, "w", 1)
    words = [int.from_bytes(key[at : at + 8], "little", signed=True) for at in (0, 8, 16)]
    expected = standard_normals(words, 0, 2 * HALF)
    assert torch.equal(sampled(accelerator, 3, "w", BLOCK, BLOCK + 2 * HALF), expected)


def test_noise_of_an_accelerator_has_its_standard_deviation_and_divisor(accelerator):
    x = torch.full((2**16,), 3.0)
    noise = (accelerator.add_(x.clone(), step=0, name="w", std=0.5) - 3.0) / 0.5
    assert FALSE_ALARM / 2 < stats.chi2.cdf(float(noise.double().square().sum()), len(x)) < 1 - FALSE_ALARM / 2
    assert torch.equal(sampled(accelerator, 0, "w", 0, 100).double().float(), sampled(accelerator, 0, "w", 0, 100))
    wide = sampled(accelerator, 0, "w", 0, 100, dtype=torch.float64)
    assert bool((wide != wide.float().double()).all())
