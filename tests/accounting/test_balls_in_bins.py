"""What the epochs of a run with random allocation cost, with steps that are taken again."""

import math
from collections import Counter

import numpy as np
import pytest

from dpshard.accounting import Release, compute_epsilon
from dpshard.accounting.allocation import losses
from dpshard.accounting.balls_in_bins import BallsInBins
from dpshard.accounting.composition import gdp_epsilon
from dpshard.accounting.spans import Span
from dpshard.config import BatchSchedule, steps_of_epoch

N, T, SIGMA = 100, 5, 1.3
WHOLE = Release(SIGMA, 1.0, N, allocated_steps=T)
COURSE = BallsInBins(WHOLE, 12)


def span(start, stop):
    return Span("run", start, stop, WHOLE, False)


def part(n, copies=1):
    return Release(SIGMA / math.sqrt(copies), n / T, N, allocated_steps=n)


@pytest.mark.parametrize("stop", range(1, 13))
def test_steps_cost_their_epochs_and_the_part_of_the_last(stop):
    whole, rest = divmod(stop, T)
    assert COURSE.cost([span(0, stop)]) == +Counter({part(T): whole, part(max(1, rest)): int(rest > 0)})
    # One by one, as after many resumes.
    assert COURSE.cost([span(step, step + 1) for step in range(stop)]) == COURSE.cost([span(0, stop)])


@pytest.mark.parametrize("stop", [1, 9])
def test_epochs_of_one_step_cost_their_steps(stop):
    """Full batches: a step is a Gaussian release. They once cost nothing."""
    whole = Release(SIGMA, 1.0, N, allocated_steps=1)
    cost = BallsInBins(whole, 9).cost([Span("run", 0, stop, whole, False)])
    assert cost == Counter({whole: stop})
    mu = math.sqrt(stop) / SIGMA
    assert gdp_epsilon(mu, 1e-3) <= compute_epsilon(tuple(cost.items()), 1e-3) <= gdp_epsilon(mu, 1e-3) * 1.001


def test_no_step_costs_nothing():
    assert COURSE.cost([]) == Counter()


@pytest.mark.parametrize(
    ("spans", "cost"),
    [
        ([(0, 7), (4, 6)], {part(T, 2): 1, part(2, 2): 1}),
        ([(0, 12), (0, 12), (6, 8)], {part(T, 2): 1, part(T, 3): 1, part(2, 2): 1}),
        ([(0, 3), (2, 10), (3, 4), (3, 4)], {part(T, 3): 1, part(T): 1}),
    ],
)
def test_a_repeated_step_makes_its_whole_epoch_dearer_and_no_other(spans, cost):
    assert COURSE.cost([span(*each) for each in spans]) == Counter(cost)


def test_an_epoch_with_one_repeated_step_costs_less_than_it_is_charged():
    """Two steps, the first released twice: quadrature over its three sums, for both directions."""
    sigma, epsilon = 1.0, 1.0
    x = np.linspace(-8, 9, 300)
    blank = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    ratio = np.exp(x - 0.5)
    under_q = blank[:, None, None] * blank[:, None] * blank
    A = (ratio[:, None, None] * ratio[:, None] + ratio) / 2
    c = math.exp(epsilon)
    true = max((under_q * np.maximum(A - c, 0)).sum(), (under_q * np.maximum(1 - c * A, 0)).sum())
    scheme = BallsInBins(Release(sigma, 1.0, N, allocated_steps=2), 2)
    ((charged, count),) = scheme.cost([span(0, 2), span(0, 1)]).items()
    ((once, _),) = scheme.cost([span(0, 2)]).items()
    assert count == 1

    def delta(release):
        return losses(release.noise_multiplier, 2, 2, 0.01).get_delta_for_epsilon(epsilon)

    assert delta(once) < true < delta(charged)


def test_the_epoch_is_the_nearest_number_of_steps():
    assert [steps_of_epoch(n, 4) for n in (4, 5, 7, 16, 1)] == [1, 1, 2, 4, 1]
    assert steps_of_epoch(42_061, 1024) == 41


def test_epochs_are_whole():
    facts = {"batch_size": 1024, "sample_size": 42_061, "epochs": 10}
    assert BatchSchedule.parse(**facts, sampling="balls-in-bins").steps == 410
    assert BatchSchedule.parse(**facts).steps == 411
