"""Weights, sensitivity and error of correlated noise, against dense matrices and all participations."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import (
    LARGEST_WEIGHT,
    PREFIX_SUMS,
    BandedInverse,
    BandMF,
    explicit,
    furthest_moves,
    inverse,
)

CORRELATIONS = [
    BandedInverse(bands=1),
    BandedInverse(bands=4),
    BandedInverse(bands=40),
    BandedInverse(bands=2, coefficients=(1, -0.8)),
    BandedInverse(bands=3, coefficients=(1, 0.5, -0.25)),
    BandMF(bands=1),
    BandMF(bands=4),
    BandMF(bands=40),
    BandMF(bands=3, coefficients=(1, 0.25, 0.5)),
]


def sensitivity(strategy, *, separation):
    """Return the bound of the whole run."""
    return float(furthest_moves(strategy, separation)[-1])


def matrix(series):
    """Return the lower triangular Toeplitz matrix of a series."""
    n = len(series)
    return np.array([[series[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def participations(steps, separation):
    """Return all non-empty sets of steps at least `separation` apart."""
    for k in range(1, steps + 1):
        for chosen in itertools.combinations(range(steps), k):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def furthest(strategy, separation):
    """Return the longest move of C S by contributions of +1 and -1, over all participations."""
    C, longest = matrix(strategy), 0.0
    for chosen in participations(len(strategy), separation):
        for signs in itertools.product((1, -1), repeat=len(chosen) - 1):
            longest = max(longest, float(np.linalg.norm(C[:, chosen] @ (1, *signs))))
    return longest


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=repr)
def test_noising_and_strategy_are_inverse(correlation):
    W, C = matrix(correlation.noising(12)), matrix(correlation.strategy(12))
    np.testing.assert_allclose(W @ C, np.eye(12), atol=1e-12)
    banded = C if isinstance(correlation, BandMF) else W
    assert not banded[correlation.bands :, 0].any()


def test_default_weights_are_those_of_a_square_root():
    weights = BandedInverse(bands=5).noising(8)
    assert weights == pytest.approx([1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, 0, 0, 0])
    square = np.convolve(BandedInverse(bands=8).noising(8), BandedInverse(bands=8).noising(8))[:8]
    assert square == pytest.approx([1, -1, 0, 0, 0, 0, 0, 0], abs=1e-15)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("bands", [1, 2, 3, 8])
def test_sensitivity_of_default_weights_is_the_furthest_move(bands, separation):
    strategy = BandedInverse(bands=bands).strategy(8)
    assert sensitivity(strategy, separation=separation) == pytest.approx(furthest(strategy, separation), rel=1e-12)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(6))
def test_no_move_is_further_than_the_sensitivity(seed, separation):
    """For strategies that rise, fall and change sign, a sum of columns need not be the longest move."""
    rest = np.random.default_rng(seed).uniform(-1, 1, 7)
    strategy = np.concatenate([[1.0], rest])
    assert sensitivity(strategy, separation=separation) >= furthest(strategy, separation) * (1 - 1e-12)


@pytest.mark.parametrize(("bands", "separation"), [(2, 2), (3, 3), (3, 5), (8, 8)])
def test_sensitivity_of_a_banded_strategy_is_that_of_orthogonal_columns(bands, separation):
    strategy = np.zeros(8)
    strategy[:bands] = [1, *np.random.default_rng(bands).uniform(-1, 1, bands - 1)]
    assert sensitivity(strategy, separation=separation) == pytest.approx(furthest(strategy, separation), rel=1e-12)


def test_sensitivity_of_plain_noise_counts_participations():
    assert sensitivity(BandedInverse(bands=1).strategy(293), separation=97) == pytest.approx(2.0)  # 4 of them


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=repr)
def test_prefix_error_is_that_of_the_matrices(correlation):
    prefixes = np.tri(12) @ matrix(correlation.noising(12))
    expected = math.sqrt(np.mean(np.sum(prefixes**2, axis=1)))
    assert PREFIX_SUMS.error(correlation.noising(12)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("bands", "steps"), [(2, 30), (5, 30), (16, 200), (64, 50)])
def test_optimised_strategy_has_the_least_error(bands, steps):
    def error(c):
        return float(np.linalg.norm(c)) * PREFIX_SUMS.error(inverse(c, steps))

    best = BandMF(bands=bands).strategy(steps)[:bands]
    assert error(best) < error(inverse(BandedInverse(bands=bands).noising(bands), bands)[:steps])
    rng = np.random.default_rng(bands)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            other = best.copy()
            other[1:] += size * rng.standard_normal(len(best) - 1) / math.sqrt(bands)
            assert error(other) > error(best) * (1 - 1e-7)


def test_strategies_that_grow_are_refused():
    strategy = BandedInverse(bands=2, coefficients=(1, -3)).strategy(1000)
    with pytest.raises(ConfigurationError, match=r"grows from step to step.*sum above 0"):
        sensitivity(strategy, separation=10)


@pytest.mark.parametrize("kind", [BandedInverse, BandMF])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bands": 0}, "bands=0"),
        ({"bands": 2.0}, "an int"),
        ({"bands": 2, "coefficients": (1.0,)}, "1 numbers for 2 bands"),
        ({"bands": 2, "coefficients": (2.0, 1.0)}, "the first of them 1"),
        ({"bands": 2, "coefficients": (1.0, math.nan)}, "finite numbers"),
        ({"bands": 2, "coefficients": [1.0, -0.5]}, "a tuple"),
    ],
)
def test_impossible_bands_are_refused(kind, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**settings)


def test_an_unclear_choice_of_buffers_is_refused():
    with pytest.raises(ConfigurationError, match="pass True or False"):
        BandMF(bands=2, buffers=3)


def sensitivity_of_weights(weights):
    """Of the inverse of these floats, exactly; one participation."""
    weights = [Fraction(w) for w in weights.tolist()]
    column = [Fraction(1)]
    for k in range(1, len(weights)):
        column.append(sum((-weights[j] * column[k - j] for j in range(1, k + 1)), Fraction(0)))
    return math.sqrt(sum(c * c for c in column))


def test_noise_whose_rounded_weights_have_another_sensitivity_is_refused():
    correlation = BandMF(bands=2, coefficients=(1.0, -3.35))
    largest = correlation.noising(12).max()
    assert 0.5 < largest / LARGEST_WEIGHT < 1
    charged = sensitivity(explicit(correlation, 12, 12).strategy(12), separation=12)
    assert sensitivity_of_weights(correlation.noising(12)) == pytest.approx(charged, rel=1e-9)
    assert sensitivity_of_weights(correlation.noising(45)) > 2 * charged
    with pytest.raises(ConfigurationError, match="grows from step to step"):
        explicit(correlation, 45, 45)
    with pytest.raises(ConfigurationError, match="grows from step to step"):
        explicit(correlation, 10_000, 10)  # to infinity
