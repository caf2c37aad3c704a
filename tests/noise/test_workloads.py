"""Noise in the sums of a model, and coefficients that are optimised for it, against dense matrices and other ones."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF, explicit
from dpshard.noise.workloads import Workload, inverse
from tests.noise.test_correlation import furthest, sensitivity

WORKLOADS = [Workload(), Workload(momentum=0.9), Workload(momentum=0.5, decay=0.1), Workload(decay=0.05)]


def matrix(series):
    return np.tril(toeplitz(series))


@pytest.mark.parametrize("workload", WORKLOADS, ids=repr)
def test_the_error_is_that_of_noise_in_a_model_under_sgd(workload):
    """SGD's own equations, of learning rate 1, applied to each unit vector of z: the rows of A W."""
    T = 9
    noising = BandedInverse(bands=4).noising(T)
    velocity, model, squares = np.zeros(T), np.zeros(T), []
    for released in matrix(noising):
        velocity = workload.momentum * velocity + released
        model = (1 - workload.decay) * model + velocity
        squares.append(model @ model)
    assert workload.error(noising) == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


@pytest.mark.parametrize("workload", WORKLOADS, ids=repr)
def test_the_root_is_one(workload):
    impulse = np.eye(1, 9)[0]
    root = matrix(inverse(workload.root(9), 9))
    np.testing.assert_allclose(root @ root, matrix(workload.sums(impulse)), rtol=1e-12)


def score(kind, coefficients, steps, separation, workload):
    found = kind(bands=len(coefficients), coefficients=tuple(coefficients))
    return sensitivity(found.strategy(steps), separation=separation) * workload.error(found.noising(steps))


@pytest.mark.parametrize("kind", [BandedInverse, BandMF])
@pytest.mark.parametrize("workload", WORKLOADS[:3], ids=repr)
@pytest.mark.parametrize(("bands", "steps", "separation"), [(2, 30, 30), (4, 30, 30), (4, 60, 12), (8, 40, 5)])
def test_no_coefficients_near_by_are_better(kind, workload, bands, steps, separation):
    """Also where a sample takes part again: there the bound of the sensitivity has kinks."""
    best = np.array(explicit(kind(bands=bands, workload=workload), steps, separation).coefficients)
    least = score(kind, best, steps, separation, workload)
    root = workload.root(bands)
    assert least < score(kind, root if kind is BandedInverse else inverse(root, bands), steps, separation, workload)
    rng = np.random.default_rng(bands)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            other = best.copy()
            other[1:] += size * rng.standard_normal(bands - 1) / math.sqrt(bands)
            assert score(kind, other, steps, separation, workload) > least * (1 - 1e-3)


@pytest.mark.parametrize("workload", WORKLOADS[:3], ids=repr)
@pytest.mark.parametrize("separation", [1, 2, 3, 5, 8])
def test_the_sensitivity_of_optimised_coefficients_bounds_the_furthest_move(workload, separation):
    strategy = explicit(BandedInverse(bands=3, workload=workload), 8, separation).strategy(8)
    assert sensitivity(strategy, separation=separation) >= furthest(strategy, separation) * (1 - 1e-12)


def test_more_bands_than_steps_are_zeros():
    found = explicit(BandedInverse(bands=6, workload=Workload()), 3, 3)
    assert found.coefficients[3:] == (0.0,) * 3
    assert found.bands == 6


@pytest.mark.parametrize("kind", [BandedInverse, BandMF])
def test_coefficients_that_depend_on_a_run_are_not_guessed(kind):
    with pytest.raises(ConfigurationError, match=r"Ask the run's mechanism\.correlation"):
        kind(bands=2, workload=Workload()).strategy(10)


@pytest.mark.parametrize("kind", [BandedInverse, BandMF])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workload": 0.9}, r"pass a dpshard\.Workload"),
        ({"workload": Workload(), "coefficients": (1.0, 0.5)}, "Leave out `coefficients` or `workload`"),
    ],
)
def test_unclear_workloads_are_refused(kind, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(bands=2, **settings)


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"decay": math.nan}, {"decay": "0"}])
def test_impossible_workloads_are_refused(settings):
    with pytest.raises(ConfigurationError, match="at least 0 and below 1"):
        Workload(**settings)
