"""Private bounds: their noise fits their sensitivity, their cost is that of one Gaussian, and they find the data."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpshard.accounting import Release, compute_epsilon
from dpshard.applications.tabular import balanced, noise_for, private_statistics
from dpshard.applications.tabular.statistics import LARGEST, ROUNDS, SPREAD, excess, quantiles
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource
from tests.accounting.ledgers import delta_of_gaussian

SECRET = bytes(range(32))
FALSE_ALARM = 1e-6


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, SPREAD]), st.integers(1, 6))
def test_a_unit_moves_the_vector_by_no_more_than_its_noise_assumes(seed, p, columns):
    random = np.random.default_rng(seed)
    units = np.unique(random.integers(0, 5, 12), return_inverse=True)[1]
    x = random.normal(size=(12, columns)) * 10.0 ** random.integers(-3, 4)
    x[random.random(x.shape) < 0.2] = np.nan
    weights = 1 / np.bincount(units)[units]
    at = random.normal(size=columns)
    for unit in np.unique(units):  # zero-out: its rows contribute nothing
        without = np.where((units == unit)[:, None], np.nan, x)
        moved = excess(x, weights, p, at) - excess(without, weights, p, at)
        assert np.linalg.norm(moved) <= math.sqrt(columns) * max(p, 1 - p) * (1 + 1e-12)


def test_the_noise_is_as_large_as_the_release_says():
    # All cells lie far below 0, where the first halving looks: f is N / 2 there, and only noise can hide that.
    columns, rows, sigma = 16_000, 290, 0.18
    std = sigma * math.sqrt(2 * ROUNDS * columns) / 2
    x = np.full((rows, columns), -1e9)
    found = quantiles(x, np.ones(rows), 0.5, -LARGEST, sigma, RandomSource(SECRET))
    wrong = int((found > 0).sum())
    hidden = stats.norm.cdf(-rows / 2 / std)
    assert stats.binomtest(wrong, columns, hidden).pvalue > FALSE_ALARM
    assert stats.binomtest(wrong, columns, stats.norm.cdf(-rows / 2 / (0.9 * std))).pvalue < FALSE_ALARM  # can fail


def test_the_share_is_that_of_one_gaussian():
    sigma = noise_for(0.3, samples=1000, target_epsilon=3.0, target_delta=1e-5)
    assert delta_of_gaussian(1 / sigma, 0.9) == pytest.approx(1e-5, rel=1e-3)
    assert compute_epsilon(((Release(sigma, 1.0, 1000), 1),), 1e-5) <= 0.9


def test_bounds_hold_the_data_of_columns_of_any_size():
    random = np.random.default_rng(0)
    columns = [random.normal(2012, 4, 4000), random.normal(0, 1e-3, 4000), np.exp(random.normal(12, 1, 4000))]
    x = np.stack([*columns, np.where(random.random(4000) < 0.4, np.nan, random.uniform(5, 6, 4000))], axis=1)
    bounds = private_statistics(x, 4.0, secret=SECRET).bounds
    inside = np.nanmean((x >= bounds[:, 0]) & (x <= bounds[:, 1]), axis=0) / (~np.isnan(x)).mean(axis=0)
    assert (inside > 0.85).all()
    spread = np.nanpercentile(x, 95, axis=0) - np.nanpercentile(x, 5, axis=0)
    assert ((bounds[:, 1] - bounds[:, 0]) < 4 * spread).all()


def test_a_unit_counts_once_however_many_rows_it_has():
    x = np.concatenate([np.zeros((500, 1)), np.full((50, 1), 7.0)])
    units = np.concatenate([np.zeros(500, int), np.arange(1, 51)])
    found = private_statistics(x, 1e-6, units=units, secret=SECRET)
    assert found.bounds.mean() == pytest.approx(7, rel=1e-3)  # one unit at 0, fifty at 7
    assert found.earlier == ((Release(1e-6, 1.0, 51), 1),)


def test_counts_of_classes_are_those_of_units():
    labels, units = np.array([0, 0, 2, 2, 1]), np.array([0, 1, 1, 2, 2])
    found = private_statistics(np.empty((5, 0)), 1e-9, units=units, labels=labels, classes=4, secret=SECRET)
    assert found.counts == pytest.approx([1.5, 0.5, 1, 0], abs=1e-6)
    assert found.earlier == ((Release(1e-9, 1.0, 3), 1),)
    for unit in range(3):  # zero-out: its rows contribute nothing
        own = units == unit
        assert np.linalg.norm(np.bincount(labels[own], np.full(own.sum(), 1 / own.sum()), 4)) <= 1 + 1e-12


@pytest.mark.parametrize("columns", [0, 1])
def test_counts_have_the_noise_of_their_part_of_the_release(columns):
    """A chi-square test of 4,000 counts: false alarms 1e-6."""
    labels = np.arange(4000)
    found = private_statistics(np.zeros((4000, columns)), 3.0, labels=labels, classes=4000, secret=SECRET)
    sigma = 3.0 * math.sqrt(1 + columns)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 4000)
    assert low < ((found.counts - 1) ** 2).sum() / sigma**2 < high
    assert compute_epsilon(found.earlier, 1e-5) == compute_epsilon(((Release(3.0, 1.0, 4000), 1),), 1e-5)


def test_balanced_weights_are_one_over_the_shares():
    assert balanced(np.array([900.0, 100.0]), 1.0) == pytest.approx((10 / 9, 10))
    weights = balanced(np.array([900.0, -5.0]), 10.0)
    assert weights[1] == pytest.approx((900 + 10 * math.sqrt(2)) / (10 * math.sqrt(2)))


def test_empty_columns_extreme_cells_and_none_at_all():
    x = np.stack([np.full(30, np.nan), np.full(30, np.inf), np.full(30, 1e300), np.full(30, 5.0)], axis=1)
    bounds = private_statistics(x, 1.0).bounds
    assert np.isfinite(bounds).all()
    assert (bounds[:, 0] < bounds[:, 1]).all()
    assert private_statistics(np.empty((30, 0)), 1.0).earlier == ()


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_shares_out_of_range_are_refused(share):
    with pytest.raises(ConfigurationError, match="statistics_share"):
        noise_for(share, samples=10, target_epsilon=1.0, target_delta=1e-3)
