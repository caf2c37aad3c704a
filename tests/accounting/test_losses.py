"""Privacy losses of a sampled Gaussian are those of dp-accounting, which computes them one by one.

Failure modes: 22 test_losses_are_those_of_dp_accounting.
"""

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy import stats

from dpshard.accounting.losses import sampled_gaussian

EPSILONS = np.linspace(-1.0, 6.0, 36)


@pytest.mark.parametrize(
    ("sigma", "probability", "interval"),
    [
        *((1.0, q, 1e-3) for q in (1e-6, 0.05, 0.999999, 1.0)),
        (0.02, 0.001, 0.2),  # losses beyond the largest exponent
        (1000.0, 0.5, 1e-5),
        (0.8, 0.06, 0.1),
    ],
)
def test_losses_are_those_of_dp_accounting(sigma, probability, interval):
    found = sampled_gaussian(sigma, probability, interval)
    theirs = from_gaussian_mechanism(sigma, sampling_prob=probability, value_discretization_interval=interval)
    for add in (False, True):
        ours, reference = (pld._pmf_add if add else pld._pmf_remove for pld in (found, theirs))
        assert ours.size == reference.size
        np.testing.assert_allclose(
            ours.get_delta_for_epsilon(EPSILONS), reference.get_delta_for_epsilon(EPSILONS), rtol=1e-9, atol=1e-14
        )


def test_a_coarse_grid_errs_above_by_little():
    """At the points of a grid the rounded divergence is the exact one, of two densities that are integrated here."""
    sigma, q = 1.0, 0.1
    x, step = np.linspace(-12, 13, 400_001, retstep=True)
    without = stats.norm.pdf(x, 0, sigma)
    within = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    losses = sampled_gaussian(sigma, q, 0.25)
    for epsilon in (0.25, 1.0, 2.5):
        for pmf, p, other in ((losses._pmf_remove, within, without), (losses._pmf_add, without, within)):
            exact = np.maximum(p - np.exp(epsilon) * other, 0).sum() * step
            assert pmf.get_delta_for_epsilon(epsilon) == pytest.approx(exact, abs=1e-8)
