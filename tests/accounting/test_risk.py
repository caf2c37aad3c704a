"""Odds that a guarantee leaves an attacker: upper bounds, and tight where the best attack is known in closed form."""

import math

import pytest
from scipy.stats import norm

from dpshard.accounting import Release, compute_epsilon, epsilon_of
from dpshard.accounting.risk import Pair, belief, found_records, mostly_below, profile, rarely_above, right_guesses


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_randomized_response_reaches_the_bounds(epsilon):
    """It tells the truth with probability e^eps / (1 + e^eps): guess what it says."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert right_guesses([Pair(epsilon, 0.0)]) == pytest.approx(truth, rel=1e-12)
    assert belief(epsilon) == pytest.approx(truth, rel=1e-12)
    # Accuse at the answer "present" alone, and then by a coin that makes 1% of the absent accused.
    coin = 0.01 / (1 - truth)
    by_coin = truth * coin if coin <= 1 else truth + (1 - truth) * (0.01 - (1 - truth)) / truth
    assert found_records([Pair(epsilon, 0.0)]) == pytest.approx(by_coin, rel=1e-12)


def test_delta_is_a_chance_to_be_found_out():
    """A mechanism that publishes the record with probability delta, and else answers at random."""
    delta, e = 0.1, 1.0
    truth = math.exp(e) / (1 + math.exp(e))
    assert right_guesses([Pair(e, delta)]) == pytest.approx(delta + (1 - delta) * truth, rel=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_gaussian_mechanism_against_its_best_test(sigma, accountant):
    """By Neyman and Pearson a threshold is the best test of N(0, 1) against N(1 / sigma, 1)."""
    counts = ((Release(noise_multiplier=sigma, sampling_probability=1.0, sample_size=100), 1),)
    pairs = profile(lambda delta: epsilon_of(counts, delta, accountant))
    best_guess, best_found = norm.cdf(0.5 / sigma), norm.cdf(norm.ppf(0.01) + 1 / sigma)
    assert best_guess <= right_guesses(pairs) <= 1
    assert best_found <= found_records(pairs) <= 1
    if accountant == "pld":
        assert right_guesses(pairs) < best_guess + 0.005
        assert found_records(pairs) < best_found + 0.01


def test_bounds_of_a_run_are_below_those_of_its_one_pair():
    counts = ((Release(noise_multiplier=1.0, sampling_probability=0.01, sample_size=10_000), 1000),)
    pairs = profile(lambda delta: epsilon_of(counts, delta, "pld"))
    one = [Pair(compute_epsilon(counts, 1e-5), 1e-5)]
    assert 0.5 < right_guesses(pairs) < right_guesses(one)
    assert 0.01 < found_records(pairs) < found_records(one)


def test_no_noise_hides_nothing_and_no_release_tells_nothing():
    nothing, everything = [Pair(0.0, 0.0)], [Pair(math.inf, 1e-5)]
    assert (right_guesses(nothing), found_records(nothing), belief(0.0)) == (0.5, 0.01, 0.5)
    assert (right_guesses(everything), found_records(everything), belief(math.inf)) == (1.0, 1.0, 1.0)


def test_belief_moves_with_the_prior():
    assert belief(math.log(9), prior=0.01) == pytest.approx(0.09 / 1.08)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-4, 1e-2])
def test_a_loss_is_rarely_above_epsilon_but_more_often_than_delta(sigma, delta):
    """The loss of the Gaussian mechanism is normal, with mean 1 / (2 sigma^2) and deviation 1 / sigma."""
    counts = ((Release(noise_multiplier=sigma, sampling_probability=1.0, sample_size=100), 1),)
    epsilon = epsilon_of(counts, delta, "pld")

    def above(loss):
        return norm.sf((loss - 0.5 / sigma**2) * sigma)

    assert delta < above(epsilon)  # so epsilon itself bounds no belief with this exception
    assert above(rarely_above(epsilon)) < 10 * delta


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_a_loss_is_mostly_below(sigma):
    """Against the normal loss of the Gaussian mechanism; one pair (epsilon, 0) is epsilon itself."""
    counts = ((Release(noise_multiplier=sigma, sampling_probability=1.0, sample_size=100), 1),)
    bound = mostly_below(profile(lambda delta: epsilon_of(counts, delta, "pld")))
    exact = 0.5 / sigma**2 + norm.isf(0.05) / sigma
    assert exact <= bound < epsilon_of(counts, 1e-4, "pld")
    assert mostly_below([Pair(2.0, 0.0)]) == 2.0
    assert mostly_below([Pair(2.0, 0.05)]) == math.inf
