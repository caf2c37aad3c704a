"""Epsilon of random allocation, against quadrature of the densities, closed moments, and simulation.

Published: Feldman and Shenfeld 2025, arXiv:2502.08202; Chua et al. 2024, arXiv:2412.16802.
"""

import math
from importlib.metadata import version

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from dpshard.accounting import Release, compute_epsilon
from dpshard.accounting import allocation as module
from dpshard.accounting.allocation import allocation, losses
from dpshard.errors import AccountingError
from tests.accounting.ledgers import delta_of_gaussian
from tests.grids import quick

N = 50


def epoch(sigma, T, n=None):
    return Release(sigma, (n or T) / T, N, allocated_steps=n or T)


def delta_of(epsilon, sigma, T, n=None, epochs=1, points=700):
    """The hockey-stick divergence over all coordinates of all epochs, the larger of both directions, by quadrature."""
    n = n or T
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, points)
    blank = np.exp(-((x / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi)) * (x[1] - x[0])
    ratio = np.exp((x - 0.5) / sigma**2)
    under_q, A = np.ones(()), np.full((), 1.0)
    for e in range(epochs):
        of_epoch, mass = np.full((), (T - n) / T), np.ones(())
        for _ in range(n):
            of_epoch, mass = of_epoch[..., None] + ratio / T, mass[..., None] * blank
        A, under_q = np.multiply.outer(A, of_epoch), np.multiply.outer(under_q, mass)
        assert A.ndim == (e + 1) * n
    c = math.exp(epsilon)
    return max(float((under_q * np.maximum(A - c, 0)).sum()), float((under_q * np.maximum(1 - c * A, 0)).sum()))


@pytest.mark.parametrize(
    ("sigma", "T", "n", "epochs", "points"),
    [(0.6, 2, 2, 1, 2000), (1.5, 2, 2, 1, 2000), (0.5, 5, 2, 1, 2000), (0.8, 3, 3, 1, 250), (1.0, 9, 1, 2, 2000)],
)
@pytest.mark.parametrize("delta", quick(1e-2, rest=[1e-5]))
def test_epsilon_is_that_of_the_densities(sigma, T, n, epochs, points, delta):
    """Two and three steps of an epoch; a part of an epoch; two epochs."""
    epsilon = compute_epsilon(((epoch(sigma, T, n), epochs),), delta)
    assert delta_of(epsilon, sigma, T, n, epochs, points) <= delta * (1 + 1e-6)
    assert delta_of(epsilon * 0.99, sigma, T, n, epochs, points) > delta


def test_two_whole_epochs_are_those_of_the_densities():
    epsilon = compute_epsilon(((epoch(1.2, 2), 2),), 1e-3)
    assert delta_of(epsilon, 1.2, 2, epochs=2, points=70) <= 1e-3
    assert delta_of(epsilon * 0.98, 1.2, 2, epochs=2, points=70) > 1e-3


@pytest.mark.parametrize(("sigma", "T"), [(0.4, 976), (0.7, 41), (1.0, 3), (2.0, 1000), (10.0, 100_000), (0.3, 8)])
def test_moments_are_those_of_a_mean_of_log_normals(sigma, T):
    """E_Q[A^2] = E_P[A] and E_Q[A^3], in closed form; a grid that is spread to keep means raises both, slightly."""
    ratio = allocation(sigma, T, T)
    a, w = np.exp(ratio.logs), math.exp(sigma**-2)
    assert math.fsum(ratio.under_q) == pytest.approx(1, abs=1e-10)
    assert math.fsum(ratio.under_p) == pytest.approx(1, abs=1e-10)
    np.testing.assert_allclose(ratio.under_p, a * ratio.under_q, rtol=1e-6)
    second = 1 + (w - 1) / T
    assert 1 - 1e-9 <= (a @ ratio.under_p - 1) / (second - 1) <= 1.015
    third = (w**3 + 3 * (T - 1) * w + (T - 1) * (T - 2)) / T**2
    assert 1 - 1e-9 <= (a**2 @ ratio.under_p) / third <= 1.04


@pytest.mark.parametrize(("sigma", "T", "epsilon"), [(0.5, 40, 0.5), (1.0, 20, 0.3)])
def test_delta_is_that_of_a_simulation(sigma, T, epsilon):
    """Samples of the loss under P and Q; false alarms below 1e-6, by the empirical Bernstein bound."""
    draws, rng = 200_000, np.random.default_rng(0)
    x = rng.normal(0, sigma, (draws, T))
    A = np.exp((x - 0.5) / sigma**2).mean(1)
    x[:, 0] += 1  # under P, by symmetry
    shifted = np.exp((x - 0.5) / sigma**2).mean(1)
    composed = losses(sigma, T, T, allocation(sigma, T, T).interval)
    for upper, loss in ((composed._pmf_remove, np.log(shifted)), (composed._pmf_add, -np.log(A))):
        seen = np.maximum(0, -np.expm1(epsilon - loss))
        certain = math.sqrt(2 * seen.var() * math.log(8e6) / draws) + 7 * math.log(8e6) / (3 * draws)
        assert abs(upper.get_delta_for_epsilon(epsilon) - seen.mean()) < certain + 0.01 * seen.mean()
        assert seen.mean() > 10 * certain


def test_an_epoch_of_one_step_is_a_gaussian():
    epsilon = compute_epsilon(((epoch(2.0, 1), 4),), 1e-5)
    assert delta_of_gaussian(1.0, epsilon) <= 1e-5 < delta_of_gaussian(1.0, epsilon * 0.999)


def test_a_single_step_of_an_epoch_is_a_poisson_batch():
    """Only one coordinate is released: P mixes it with probability 1 / T."""
    poisson = compute_epsilon(((Release(1.0, 0.1, N), 1),), 1e-5)
    assert compute_epsilon(((epoch(1.0, 10, 1), 1),), 1e-5) == pytest.approx(poisson, rel=2e-3)


def test_more_noise_fewer_steps_and_fewer_epochs_cost_less():
    def eps(sigma, n, epochs):
        return compute_epsilon(((epoch(sigma, 40, n), epochs),), 1e-6)

    for epochs in (1, 5):
        by_steps = [eps(1.4, n, epochs) for n in (1, 20, 39, 40)]
        assert by_steps == sorted(set(by_steps))
        assert all(eps(0.7, n, epochs) > of_less for n, of_less in zip((1, 20, 39, 40), by_steps, strict=True))
    assert all(eps(1.4, n, 1) < eps(1.4, n, 5) for n in (1, 20, 39, 40))


def test_a_finer_grid_lowers_epsilon_by_less_than_a_thousandth():
    """At 41 steps and 10 epochs, where Poisson sampling needs a 4% larger sigma."""
    coarse = compute_epsilon(((epoch(0.6556, 41), 10),), 8e-6)
    fine = losses(0.6556, 41, 41, allocation(0.6556, 41, 41, 0.0125).interval, 0.0125).self_compose(10)
    assert 0.999 * coarse < fine.get_epsilon_for_delta(8e-6) < coarse <= 8.0
    assert compute_epsilon(((Release(0.6556, 1 / 41, N), 410),), 8e-6) > 8.5


def test_a_grid_that_does_not_keep_means_would_fail(monkeypatch):
    """The tests above see a rounding to the nearest grid point, which is what a careless discretisation does."""
    honest = module._split

    def nearest(logs, interval):
        low, _ = honest(logs, interval)
        upper = (np.abs(logs - (low + 1) * interval) < np.abs(logs - low * interval)).astype(float)
        return low, [(0, 1 - upper, 1 - upper), (1, upper, upper)]

    monkeypatch.setattr(module, "_split", nearest)
    module.mean_of.cache_clear()
    ratio = allocation(1.0, 1000, 1000)
    second = 1 + math.expm1(1) / 1000
    monkeypatch.undo()
    module.mean_of.cache_clear()
    assert not (1 - 1e-9 <= (np.exp(ratio.logs) @ ratio.under_p - 1) / (second - 1) <= 1.01)


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_other_accountants_refuse(accountant):
    with pytest.raises(AccountingError, match=r"balls-in-bins.*accountant='pld'"):
        compute_epsilon(((epoch(1.0, 10), 1),), 1e-5, accountant)


@pytest.mark.parametrize("setting", [{"max_batch_size": 10}, {"max_rows_per_unit": 2}])
def test_what_is_not_analysed_is_refused(setting):
    with pytest.raises(AccountingError, match="Random allocation"):
        compute_epsilon(((Release(1.0, 1.0, N, allocated_steps=10, **setting), 1),), 1e-5)


@pytest.mark.parametrize(
    ("sigma", "T", "epochs", "delta", "theirs"),
    [
        (1.3, 5, 1, 1e-5, 1.7963168),
        (0.5, 40, 1, 1e-6, 7.3101776),
        (1.0, 40, 1, 1e-6, 1.4670487),
        (0.6556, 41, 10, 8e-6, 8.0132468),
        (1.03, 97, 3, 1e-6, 1.1173120),
    ],
)
def test_epsilon_is_that_of_another_library(sigma, T, epochs, delta, theirs):
    """RandomAllocationDpEvent of google/differential-privacy, pull request 414, commit 125d46c; grid interval 1e-3.

    Both are upper bounds, found in different ways; they differ by less than 1%.
    """
    assert compute_epsilon(((epoch(sigma, T), epochs),), delta) == pytest.approx(theirs, rel=1e-2)


def test_epsilon_is_that_of_the_installed_dp_accounting():
    """No release of dp-accounting up to 0.6.0 has the event; this test begins to run with the first one."""
    event = getattr(dp_accounting, "RandomAllocationDpEvent", None)
    if event is None:
        pytest.skip(f"dp-accounting {version('dp-accounting')} has no RandomAllocationDpEvent")
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-2)
    accountant.compose(event(dp_accounting.GaussianDpEvent(1.3), 1, 5), 2)
    assert compute_epsilon(((epoch(1.3, 5), 2),), 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-2)
