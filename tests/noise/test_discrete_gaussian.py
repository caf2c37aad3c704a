"""The exact sampler of the discrete Gaussian, against the probabilities that it is to have.

Statistical tests run under a fixed key: they pass or fail for good, and a correct sampler fails under a random key with
probability FALSE_ALARM each.
"""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpshard.noise import discrete_gaussian
from dpshard.noise.discrete_gaussian import LOG2_STD, DiscreteGaussian, exp_coin, exp_coins
from dpshard.randomness import RandomSource, derive_key

FALSE_ALARM = 1e-7


def source(*purpose):
    return RandomSource(derive_key(bytes(range(32)), *purpose))


def probabilities(log2_std, limit):
    """Return the probabilities of -limit, ..., limit, and of all others together."""
    y = np.arange(-12 << log2_std, (12 << log2_std) + 1)
    weights = np.exp(-np.square(y / 2**log2_std) / 2)
    weights /= weights.sum()
    inside = np.abs(y) <= limit
    return np.append(weights[inside], weights[~inside].sum())


@pytest.mark.parametrize(
    ("log2_std", "log2_cells", "word", "n"),
    [
        pytest.param(4, 4, 64, 400_000, id="cells of one"),
        pytest.param(6, 4, 64, 400_000, id="as it is, but small"),
        pytest.param(9, 5, 64, 400_000, id="finer cells"),
        # Words too short to decide every seventh, and every third, cell.
        pytest.param(6, 4, 8, 100_000, id="words of 8 bits"),
        pytest.param(5, 5, 7, 50_000, id="words of 7 bits"),
    ],
)
def test_integers_have_their_probabilities(log2_std, log2_cells, word, n):
    limit = 4 << log2_std
    sample = DiscreteGaussian(log2_std, log2_cells, word).sample(n, source(log2_std, word))
    inside = sample[np.abs(sample) <= limit]
    counts = np.append(np.bincount(inside + limit, minlength=2 * limit + 1), n - len(inside))
    assert stats.chisquare(counts, n * probabilities(log2_std, limit)).pvalue > FALSE_ALARM
    # Sharper at 0, the one integer with two signs.
    assert stats.binomtest(int((sample == 0).sum()), n, probabilities(log2_std, limit)[limit]).pvalue > FALSE_ALARM
    # Independence of neighbours, and of their magnitudes.
    for part in (sample, np.abs(sample)):
        assert stats.pearsonr(part[:-1], part[1:]).pvalue > FALSE_ALARM


def test_integers_of_the_real_size():
    n = 2_000_000
    sample = DiscreteGaussian().sample(n, source("real"))
    normal_n = sample / 2.0**LOG2_STD  # two million draws are indistinguishable from normals at this size
    assert FALSE_ALARM / 2 < stats.chi2.cdf(float(np.square(normal_n).sum()), n) < 1 - FALSE_ALARM / 2
    assert stats.kstest(normal_n, "norm").pvalue > FALSE_ALARM
    # All bits are random, down to the last: residues are uniform up to a part in e^(2 pi^2 s^2 / 256^2).
    assert stats.chisquare(np.bincount(sample & 255, minlength=256)).pvalue > FALSE_ALARM
    # Also within cells: if all candidates were accepted, far places of a cell would be too frequent.
    width = 1 << (LOG2_STD - 4)
    cell, place = np.abs(sample) // width, np.abs(sample) % width / width
    steep, x = cell >= 12, (np.arange(1000) + 0.5) / 1000
    density = np.exp(-np.square((np.arange(200)[:, None] + x) / 16) / 2)
    means = (density * x).sum(1) / density.sum(1)
    root = math.sqrt(12 * steep.sum())
    assert abs(place[steep].mean() - means[cell[steep]].mean()) * root < stats.norm.isf(FALSE_ALARM / 2)
    assert abs(0.5 - means[cell[steep]].mean()) * root > 3 * stats.norm.isf(FALSE_ALARM / 2)  # so it can fail


@pytest.mark.parametrize(("bits", "log2_cells"), [(64, 4), (64, 6), (8, 4), (192, 4)])
def test_thresholds_are_those_of_high_precision(bits, log2_cells):
    thresholds = discrete_gaussian._thresholds(bits, log2_cells)
    with mpmath.workprec(2 * bits + 200):
        weights = [mpmath.exp(-mpmath.mpf(k * k) / (2 * 4**log2_cells)) for k in range(40 << log2_cells)]
        total, below = sum(weights), mpmath.mpf(0)
        for weight, threshold in zip(weights, thresholds, strict=False):
            below += weight
            assert threshold == int(mpmath.floor(below / total * 2**bits))
    assert thresholds[-1] == 2**bits - 1
    assert thresholds[-2] < 2**bits - 1


def test_too_few_digits_are_noticed():
    assert discrete_gaussian._certain_thresholds(64, 4, 20) is None
    assert discrete_gaussian._certain_thresholds(64, 4, 51) == discrete_gaussian._thresholds(64, 4)


def test_nothing_overflows():
    """Check [Note: Overflow] for all cells."""
    cells, width = len(discrete_gaussian._thresholds(64, 4)), 1 << (LOG2_STD - 4)
    assert cells <= 152
    assert (width - 1) * (2 * (cells - 1) * width + width - 1) < 2 ** (2 * LOG2_STD + 1)


@pytest.mark.parametrize("numerator", [0, 1, 2**45, 2**47, 2**48, 3 * 2**47, 2**49 - 1])
def test_coins_have_their_probability(numerator):
    n, a = 200_000, numerator / 2**49
    heads = int(exp_coins(np.full(n, numerator), 49, source("coins", numerator)).sum())
    assert stats.binomtest(heads, n, math.exp(-a)).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("numerator", "bits"), [(0, 3), (5, 3), (3 * 2**70, 72), (2**49, 49), (7 * 2**47, 49)])
def test_single_coins_have_their_probability(numerator, bits):
    n, stream = 10_000, source("coin", numerator)
    heads = sum(exp_coin(numerator, bits, stream) for _ in range(n))
    assert stats.binomtest(heads, n, math.exp(-numerator / 2**bits)).pvalue > FALSE_ALARM


def test_coins_of_unequal_probabilities_are_tossed_each_by_its_own():
    n = 100_000
    numerators = np.where(np.arange(n) % 2, 2**62, 0)
    coins = exp_coins(numerators, 62, source("unequal"))
    assert coins[::2].all()
    assert stats.binomtest(int(coins[1::2].sum()), n // 2, math.exp(-1)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("i", [1, 2, 3, 4, 5, 7])
def test_chances_are_equal(i):
    n = 200_000
    assert (
        stats.binomtest(int(discrete_gaussian._one_in(i, n, source("one in", i)).sum()), n, 1 / i).pvalue > FALSE_ALARM
    )
