"""Epsilon of units of several samples that are drawn one by one, against quadrature of the densities.

Published: Charles et al. 2024, arXiv:2407.07737 (example-level sampling under user-level privacy).
"""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from dpshard.accounting import (
    MechanismOfUnits,
    Release,
    calibrate,
    composition,
    compute_bound,
    compute_epsilon,
    mixtures,
)
from dpshard.accounting.fourier import SINGLE_ABSOLUTE, SINGLE_ERROR
from dpshard.accounting.releases import relation_of
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError, ConfigurationError
from tests.accounting.ledgers import delta_of_gaussian

DELTA = 1e-4


def densities(G, q, sigma, points):
    """Log densities of one step without the unit and with all of it, on a grid, and the step of the grid."""
    x = np.linspace(-11 * sigma, G + 11 * sigma, points)
    drawn = np.arange(G + 1)
    blank = stats.norm.logpdf(x, scale=sigma)
    shifted = stats.norm.logpdf(x[:, None], loc=drawn, scale=sigma) + stats.binom.logpmf(drawn, G, q)
    return blank, logsumexp(shifted, axis=1), x[1] - x[0]


def delta_of(epsilon, G, q, sigma, steps):
    """The hockey-stick divergence of one or two steps, the larger of both directions."""
    blank, full, dx = densities(G, q, sigma, 20_000 if steps == 1 else 1_500)
    if steps == 2:
        blank, full, dx = (blank[:, None] + blank).ravel(), (full[:, None] + full).ravel(), dx**2
    p, r = np.exp(blank), np.exp(full)
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) * dx for a, b in ((p, r), (r, p)))


@pytest.mark.parametrize(("G", "q", "sigma", "steps"), [(4, 0.1, 1.0, 1), (16, 0.05, 1.5, 1), (3, 0.2, 1.2, 2)])
def test_epsilon_is_that_of_the_densities(G, q, sigma, steps):
    release = Release(sigma, q, 1000, max_rows_per_unit=G)
    epsilon = compute_epsilon(((release, steps),), DELTA)
    assert delta_of(epsilon, G, q, sigma, steps) <= DELTA
    assert delta_of(epsilon * 0.98, G, q, sigma, steps) > DELTA
    # Accounts that take samples for units would promise too much.
    assert delta_of(compute_epsilon(((Release(sigma, q, 1000), steps),), DELTA), G, q, sigma, steps) > 10 * DELTA


def test_units_of_one_sample_are_samples():
    mechanism = {"schedule": BatchSchedule((10,) * 50), "sample_size": 1000, "noise_multiplier": 1.0}
    assert MechanismOfUnits(**mechanism, max_rows_per_unit=1).releases() == ((Release(1.0, 0.01, 1000), 50),)


def test_all_samples_in_every_step_are_one_gaussian():
    epsilon = compute_epsilon(((Release(8.0, 1.0, 1000, max_rows_per_unit=4), 1),), DELTA)
    assert delta_of_gaussian(4 / 8, epsilon) == pytest.approx(DELTA, rel=1e-6)


def test_more_samples_of_a_unit_cost_more_and_never_more_than_groups():
    """Epsilon rises with G; G samples that come together are a group, whose sensitivity is G."""
    found = [compute_epsilon(((Release(2.0, 0.2, 1000, max_rows_per_unit=G), 3),), DELTA) for G in (1, 2, 8)]
    assert found == sorted(found)
    group = compute_epsilon(((Release(2.0 / 8, 1 - 0.8**8, 1000), 3),), DELTA, "rdp")
    assert found[-1] < group


def test_large_units_are_bounded():
    """Numbers of samples that are too rare to matter count as the whole unit."""
    epsilon = compute_epsilon(((Release(2.0, 1e-3, 100_000, max_rows_per_unit=1000), 1),), 1e-6)
    assert 2.0 < epsilon < 20


def test_noise_for_units():
    run = MechanismOfUnits(schedule=BatchSchedule((200,) * 3), sample_size=1000, max_rows_per_unit=4)
    sigma = calibrate(run, target_epsilon=2.0, target_delta=DELTA).noise_multiplier
    release = Release(sigma, 0.2, 1000, max_rows_per_unit=4)
    bound = compute_bound(((release, 3),), DELTA)
    assert 1.99 < bound.epsilon <= 2.0
    assert (bound.accountant, relation_of([release])) == ("pld", "add-or-remove-one")


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_other_accountants_refuse_units(accountant):
    with pytest.raises(AccountingError, match="accountant='pld'"):
        compute_epsilon(((Release(1.0, 0.1, 1000, max_rows_per_unit=2), 1),), DELTA, accountant)


@pytest.mark.parametrize("other", [{"max_batch_size": 200}, {"discretized_elements": 10}])
def test_what_is_not_analysed_for_units_is_refused(other):
    with pytest.raises(AccountingError, match="max_rows_per_unit=2"):
        compute_epsilon(((Release(1.0, 0.1, 1000, max_rows_per_unit=2, **other), 1),), DELTA)


@pytest.mark.parametrize("G", [0, 1.5, None])
def test_a_number_of_samples_is_a_count(G):
    with pytest.raises(ConfigurationError, match="max_rows_per_unit"):
        Release(1.0, 0.1, 1000, max_rows_per_unit=G)


def exact_step(release, epsilon, added):
    """Delta of one step by 50 digits, but for the edge of the losses."""
    drawn, probabilities = mixtures.mixture(release)
    sigma, (none, *some) = mpmath.mpf(release.noise_multiplier), [mpmath.mpf(p) for p in probabilities]
    level = mpmath.exp(-epsilon if added else epsilon)
    if none >= level:
        return mpmath.mpf(0) if added else 1 - mpmath.exp(epsilon)
    low, edge, high = mpmath.mpf(-1000), mpmath.mpf(0), mpmath.mpf(1000)
    for _ in range(100):
        ratio = none + sum(
            p * mpmath.exp((2 * k * edge - k * k) / (2 * sigma**2)) for k, p in zip(drawn[1:], some, strict=True)
        )
        low, high = (low, edge) if ratio > level else (edge, high)
        edge = (low + high) / 2
    tails = [mpmath.erfc((k - edge if added else edge - k) / sigma / mpmath.sqrt(2)) / 2 for k in drawn]
    full = sum(p * tail for p, tail in zip((none, *some), tails, strict=True))
    return tails[0] - mpmath.exp(epsilon) * full if added else full - mpmath.exp(epsilon) * tails[0]


def lacking(release, interval, losses, added):
    """What delta of one step lacks over its mass of losses above, at most."""
    places = np.concatenate([np.linspace(0, len(losses.masses) / 2, 24), len(losses.masses) - np.arange(2, 7)])
    for k in places.astype(int):
        distances = interval * np.arange(1, len(losses.masses) - k)
        found = math.fsum(-np.expm1(-distances) * losses.masses[k + 1 :]) + losses.infinite + SINGLE_ABSOLUTE
        exact = exact_step(release, mpmath.mpf(interval) * int(losses.first + k), added)
        yield float((exact - found) / losses.masses[k:].sum())


@pytest.mark.parametrize(
    ("sigma", "q", "G", "interval", "way"),
    [
        (0.7, 1e-3, 3, 1e-2, 0),  # the edge is off by 1e-6
        (0.5, -math.expm1(-(7 + 6e-5) / 3), 3, 1e-2, 1),  # a grid point near the largest loss
        (2.0, 0.1, 8, 1e-2, 0),
    ],
)
def test_masses_of_a_step_are_as_exact_as_assumed(sigma, q, G, interval, way):
    release = Release(sigma, q, 1000, max_rows_per_unit=G)
    losses = composition._directions(release, "add-or-remove-one", interval)[way]
    with mpmath.workdps(50):
        worst = max(lacking(release, interval, losses, bool(way)))
    assert SINGLE_ERROR < worst < losses.error  # more than of plain samples
