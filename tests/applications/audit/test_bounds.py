"""The bounds of audits, on mechanisms whose epsilon is known in closed form.

Seeds are fixed, so the tests pass or fail for good. FALSE_ALARM: with it a correct bound fails under another seed.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpshard.accounting import Release, compute_epsilon
from dpshard.accounting.composition import gdp_delta, gdp_epsilon
from dpshard.applications.audit.bounds import Trials, guess, one_run_epsilon, one_run_p_value
from dpshard.errors import ConfigurationError

FALSE_ALARM = 1e-6
DELTA = 1e-5


def gaussian_trials(mu, n, rng, at=0.5):
    """Return a threshold test of N(0, 1) against N(mu, 1)."""
    without, within = rng.normal(0, 1, n), rng.normal(mu, 1, n)
    return Trials(int((without > mu * at).sum()), n, int((within <= mu * at).sum()), n)


@given(errors=st.integers(0, 50), more=st.integers(0, 50), error=st.floats(1e-9, 0.2))
def test_the_bound_of_a_rate_is_where_so_few_errors_become_unlikely(errors, more, error):
    n = errors + more + 1
    a, _ = Trials(errors, n, 0, 1).rates(1 - 2 * error)
    assert stats.binom.cdf(errors, n, a) == pytest.approx(error, rel=1e-6)


def test_a_rate_of_one_is_bounded_by_one():
    assert Trials(5, 5, 5, 5).rates(0.9) == (1.0, 1.0)
    assert Trials(5, 5, 5, 5).epsilon(DELTA, 0.9) == Trials(5, 5, 5, 5).mu(0.9) == 0.0


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0, 8.0])
def test_epsilon_of_a_gaussian_is_that_of_the_closed_form(mu):
    epsilon = gdp_epsilon(mu, DELTA)
    assert gdp_delta(mu, epsilon) == pytest.approx(DELTA, rel=1e-6)
    # The definition, by integration: the mass by which one normal exceeds e^epsilon times the other.
    x = np.linspace(-12, mu + 12, 400_001)
    excess = np.maximum(0, stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x))
    assert np.trapezoid(excess, x) == pytest.approx(DELTA, rel=1e-4)


def test_epsilon_of_a_gaussian_is_that_of_the_accountant():
    accounted = compute_epsilon(((Release(0.8, 1.0, 10_000), 1),), DELTA)
    assert gdp_epsilon(1 / 0.8, DELTA) == pytest.approx(accounted, rel=1e-3)
    assert gdp_epsilon(0.001, 0.5) == gdp_epsilon(0.0, DELTA) == 0.0


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_bounds_pass_the_truth_as_seldom_as_they_say(mu, confidence):
    rng, runs = np.random.default_rng(0), 2000
    trials = [gaussian_trials(mu, 400, rng) for _ in range(runs)]
    allowed = stats.binom.isf(FALSE_ALARM, runs, 1 - confidence)
    assert sum(t.mu(confidence) > mu for t in trials) <= allowed
    truth = gdp_epsilon(mu, DELTA)
    assert sum(t.epsilon(DELTA, confidence) > truth for t in trials) <= allowed
    loose = gdp_epsilon(mu, 0.2)
    assert sum(t.epsilon(0.2, confidence) > loose for t in trials) <= allowed


def test_the_bound_reaches_its_share_of_the_truth():
    """At mu = 2, 2,000 trials of each kind prove 90% of mu with confidence 95%, and 80% with 1 - 1e-6."""
    rng = np.random.default_rng(1)
    trials = gaussian_trials(2.0, 2000, rng)
    assert 0.9 * 2 < trials.mu(0.95) < 2
    assert 0.8 * 2 < trials.mu(1 - 1e-6) < trials.mu(0.95)


def test_both_directions_count():
    """Rates (0.6, 0.001) and (0.001, 0.6) prove the same."""
    one, other = Trials(600, 1000, 1, 1000), Trials(1, 1000, 600, 1000)
    assert one.epsilon(DELTA, 0.95) == other.epsilon(DELTA, 0.95) > 4


def binary_response(epsilon, m, rng):
    included = rng.random(m) < 0.5
    honest = rng.random(m) < 1 / (1 + math.exp(-epsilon))
    return included, np.where(honest, included, ~included)


def test_the_p_value_of_pure_privacy_is_a_binomial_tail():
    """Randomised response attains it: m canaries, each reported truly with probability e^eps / (1 + e^eps)."""
    p = one_run_p_value(100, 100, 80, 1.0, 0.0)
    assert p == pytest.approx(sum(stats.binom.pmf(k, 100, math.e / (1 + math.e)) for k in range(80, 101)))
    assert one_run_p_value(100, 60, 0, 1.0, 1e-5) == 1.0


@pytest.mark.parametrize(("m", "r", "v", "delta"), [(50, 40, 31, 1e-3), (1000, 200, 180, 1e-5), (10, 10, 10, 0.01)])
def test_delta_enters_as_in_the_theorem(m, r, v, delta):
    """Theorem 5.2, term by term in loops."""
    chance = 1 / (1 + math.exp(-0.7))
    pmf = [stats.binom.pmf(k, r, chance) for k in range(r + 1)]
    alpha = max(2 / i * sum(pmf[v - i : v]) for i in range(1, v + 1))
    assert one_run_p_value(m, r, v, 0.7, delta) == pytest.approx(sum(pmf[v:]) + alpha * m * delta)


def test_what_all_guesses_right_prove():
    """If all r are right, every epsilon with (e^eps / (1 + e^eps))^r below the error is refuted: a closed form."""
    bound = one_run_epsilon(100, 100, 100, 0.0, 0.95)
    chance = 0.05 ** (1 / 100)
    assert bound == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    assert one_run_epsilon(100, 100, 50, 0.0, 0.95) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_one_run_passes_the_truth_as_seldom_as_it_says(epsilon):
    rng, runs = np.random.default_rng(2), 200
    bounds = []
    for _ in range(runs):
        included, answers = binary_response(epsilon, 500, rng)
        bounds.append(one_run_epsilon(500, 500, int((included == answers).sum()), 0.0, 0.9))
    above = sum(bound > epsilon for bound in bounds)
    assert above <= stats.binom.isf(FALSE_ALARM, runs, 0.1)
    assert above > 0  # not idle: against randomised response the bound is tight
    assert np.median(bounds) > 0.75 * epsilon


def test_one_run_of_gaussian_scores():
    """Canaries of a 1-sigma Gaussian mechanism: the bound is below the truth here, but not far."""
    rng, m = np.random.default_rng(3), 1000
    for mu, share in ((1.0, 0.3), (2.0, 0.28)):
        bounds = []
        for _ in range(20):
            included = rng.random(m) < 0.5
            bounds.append(guess(rng.normal(0, 1, m) + mu * included, included).epsilon(DELTA, 0.95))
        truth = gdp_epsilon(mu, DELTA)
        assert max(bounds) < truth
        assert np.median(bounds) > share * truth


def test_guesses_are_made_at_both_ends():
    scores, included = np.array([5.0, 1.0, -3.0, 2.0, math.nan, 0.0]), np.array([True, False, False, True, False, True])
    guesses = guess(scores, included)
    assert guesses.canaries == 6
    assert guesses.tried == ((2, 2), (6, 4))  # of all six, 1.0 and 0.0 mislead


@pytest.mark.parametrize("wrong", [(3, 2, 0, 1), (0, 0, 0, 1), (-1, 2, 0, 1)])
def test_impossible_trials_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="trials"):
        Trials(*wrong)


def test_impossible_questions_are_refused():
    with pytest.raises(ConfigurationError, match="confidence"):
        Trials(1, 2, 1, 2).mu(1.0)
    for delta in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="delta="):
            gdp_epsilon(1.0, delta)
    with pytest.raises(ConfigurationError, match="at most the next"):
        one_run_p_value(5, 6, 1, 1.0, DELTA)
    with pytest.raises(ConfigurationError, match="at least two"):
        guess([1.0], [True])
