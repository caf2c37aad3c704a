"""Balls in bins with correlated noise: the simulated bound against quadrature of the densities; steps of its proof."""

import itertools
import json
import math
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import special, stats

from dpshard.accounting import Release, SampledMechanism, calibrate, compute_epsilon, simulation
from dpshard.accounting.spans import Span
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError, ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF

SIGNED = BandMF(bands=3, coefficients=(1, -0.6, 0.3))


def run_of(correlation, *, batch_size=10, samples=40, steps=4, sampling="balls-in-bins", **facts):
    schedule = BatchSchedule((batch_size,) * steps)
    return SampledMechanism(
        schedule=schedule, sample_size=samples, sampling=sampling, noise_correlation=correlation, **facts
    )


def hockey_sticks(moves, std, epsilon, points):
    """Return both divergences at `epsilon` of the equal mixture of N(move, std^2) [bins, dimensions], by quadrature."""
    moves = np.asarray(moves, float) / std
    axes = [np.linspace(min(0, low) - 6.5, max(0, high) + 6.5, points) for low, high in zip(*edges(moves), strict=True)]
    under_q = np.ones(())
    for x in axes:
        under_q = np.multiply.outer(under_q, np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0]))
    A = np.zeros(under_q.shape)
    for move in moves:
        exponent = np.full((), -(move @ move) / 2)
        for x, component in zip(axes, move, strict=True):
            exponent = np.add.outer(exponent, component * x)
        A += np.exp(exponent) / len(moves)
    c = math.exp(epsilon)
    return float((under_q * np.maximum(A - c, 0)).sum()), float((under_q * np.maximum(1 - c * A, 0)).sum())


def edges(moves):
    return moves.min(0), moves.max(0)


def moved(column, steps, bins, contributions):
    """Return the rows of C S [bins, steps * d] by contributions [steps, d] of a sample in each bin."""
    rows = np.zeros((bins, steps, contributions.shape[1]))
    for i in range(bins):
        for s in range(i, steps, bins):
            rows[i, s:] += column[: steps - s, None] * contributions[s]
    return rows.reshape(bins, -1)


@pytest.mark.parametrize(
    ("correlation", "steps", "bins", "points"),
    [
        (BandedInverse(bands=2), 2, 2, 400),
        (BandMF(bands=2, coefficients=(1, 0.7)), 3, 3, 120),
        (SIGNED, 3, 3, 120),
        (BandedInverse(bands=3), 4, 2, 44),
        (SIGNED, 4, 2, 44),
    ],
)
@pytest.mark.parametrize("noise", [0.8, 1.5])
def test_epsilon_is_at_least_that_of_the_densities(correlation, steps, bins, points, noise):
    """One epoch and two, with contributions of both signs."""
    run = run_of(correlation, steps=steps, samples=10 * bins, noise_multiplier=noise)
    column, std = correlation.strategy(steps), noise * run.sensitivity
    delta = 1e-3
    epsilon = compute_epsilon(run.releases(), delta)
    worst = 0.0
    for signs in itertools.product((1, -1), repeat=steps - 1):
        contributions = np.array([1, *signs], float)[:, None]
        worst = max(worst, *hockey_sticks(moved(column, steps, bins, contributions), std, epsilon, points))
    assert worst <= delta
    if correlation != SIGNED:
        equal = moved(column, steps, bins, np.ones((steps, 1)))
        assert max(hockey_sticks(equal, std, 0.65 * epsilon, points)) > delta


@pytest.mark.parametrize("epsilon", [0.2, 1.5])
def test_vectors_cost_less_than_numbers_and_numbers_less_than_a_circle(epsilon):
    """The two uses of Kahane's inequality: three sets of moves whose inner products grow."""
    column, std = np.array([1.0, 0.8]), 0.9
    orthogonal = moved(column, 2, 2, np.eye(2))[:, [0, 2, 3]]  # the second coordinate of row 0 never moves
    numbers = moved(column, 2, 2, np.ones((2, 1)))
    circle = np.array([[1.0, 0.8], [0.8, 1.0]])
    sticks = [hockey_sticks(moves, std, epsilon, 130) for moves in (orthogonal, numbers, circle)]
    for direction in zip(*sticks, strict=True):
        assert direction[0] < direction[1] < direction[2]


@pytest.mark.parametrize(("sigma", "looser"), [(0.5, 1.12), (1.0, 1.45)])
def test_plain_noise_costs_more_than_by_the_exact_accountant(sigma, looser):
    """The price of continuing the tail: little where one bin decides the loss, more where many bins blur it."""
    simulated = run_of(BandMF(bands=1), samples=400, steps=40, noise_multiplier=sigma)
    exact = replace(simulated, noise_correlation=None)
    epsilons = [compute_epsilon(run.releases(), 1e-6) for run in (exact, simulated)]
    assert epsilons[0] < epsilons[1] < looser * epsilons[0]


def test_covariance_of_bins_is_that_of_columns_on_a_circle():
    correlation, T = BandedInverse(bands=4), 5
    run = run_of(correlation, samples=50, steps=12, noise_multiplier=1.0)
    column = np.concatenate([correlation.strategy(12), np.zeros(3)])  # three epochs
    columns = [sum(np.roll(column, i + T * e) for e in range(3)) for i in range(T)]
    covariance = np.array([[a @ b for a in columns] for b in columns])
    assert run.sensitivity == pytest.approx(math.sqrt(covariance[0, 0]))
    circle = simulation._circle(run.release(0).overlaps, T) * run.sensitivity**2
    assert np.all(circle >= covariance[0])
    np.testing.assert_allclose(circle, covariance[0], rtol=1e-5)
    assert np.fft.fft(circle).real.min() >= -1e-9
    # All real moves have smaller inner products.
    real = moved(correlation.strategy(12), 12, T, np.ones((12, 1)))
    assert np.all(real @ real.T <= covariance * (1 + 1e-12))


def test_draws_have_the_covariance():
    """False alarms below 1e-6: 8 deviations of means of 2^18 products."""
    circle = simulation._circle((1.0, 0.6, 0.2), 4)
    of_p, of_q = (np.concatenate(part) for part in zip(*simulation._draw(circle), strict=True))
    n = simulation.DRAWS
    assert len(of_p) == len(of_q) == n
    expected = np.exp(circle).mean()  # of A under P, and of 1 / A under P
    for seen, mean in ((np.exp(of_p), expected), (np.exp(-of_p), 1.0), (np.exp(-of_q), 1.0)):
        assert abs(seen.mean() - mean) < 8 * seen.std() / math.sqrt(n)


def test_the_tail_covers_a_gaussian_of_its_deviation_closely():
    falling = np.sort(stats.norm(0.3, 2.0).rvs(2**18, random_state=1))[::-1]
    tail = simulation._tail(falling, 2.0)
    t = np.array([8.0, 10.0, 12.0])
    true = stats.norm(0.3, 2.0).sf(t)
    assert np.all(tail.above(t) > true)
    assert np.all(tail.above(t) < 2 * true)
    assert tail.above(tail.start.min(keepdims=True) - 1)[0] == 1.0


def test_masses_beyond_the_ranks_are_exceeded_as_rarely_as_they_should(monkeypatch):
    """With 1,200 times the failure of one rank in place of 1e-12 in all: 0.01 each, in 2,000 trials of 6 ranks."""
    monkeypatch.setattr(simulation, "SIMULATION_FAILURE", 0.01 * 2 * len(simulation.RANKS) * simulation.SIGMAS)
    random, wrong = np.random.default_rng(0), 0
    for _ in range(2000):
        # Only the k-th largest of n uniform numbers counts; it has this distribution.
        n = 50_000
        largest = [1 - random.beta(k, n - k + 1) for k in simulation.RANKS]
        falling = np.zeros(n)
        falling[[k - 1 for k in simulation.RANKS]] = special.ndtri(largest)
        tail = simulation._tail(falling, 1.0)
        wrong += int((special.ndtr(tail.mean - tail.start) < 1 - np.array(largest)).sum())
    # Each is wrong with probability 0.01: 120 in 12,000, and 55 more have a probability below 1e-6.
    assert 70 < wrong < 175


def test_fresh_draws_stay_below_the_bound(monkeypatch):
    """Another seed: the masses far beyond the best rank, where about 26 of 262,144 draws lie."""
    run = run_of(BandedInverse(bands=8), samples=200, steps=20, noise_multiplier=0.8)
    circle = simulation._circle(run.release(0).overlaps, 20)
    tails = simulation._tails(run.release(0).overlaps, 20, simulation._rounded_down(0.8))
    monkeypatch.setattr(simulation, "SEED", 77)
    for tail, part in zip(tails, zip(*simulation._draw(circle / 0.8**2), strict=True), strict=True):
        t = np.quantile(np.concatenate(part), [0.99, 0.999, 0.9999])
        assert np.all(tail.above(t) > np.array([1e-2, 1e-3, 1e-4]))
        assert np.all(tail.above(t) < np.array([3e-2, 5e-3, 1e-3]) * 4)


def test_calibration_is_conservative_and_beats_a_fixed_order():
    budget = {"target_epsilon": 4.0, "target_delta": 1e-6}
    bins = calibrate(run_of(BandedInverse(bands=8), samples=400, steps=40), **budget)
    order = calibrate(run_of(BandedInverse(bands=8), samples=400, steps=40, sampling="fixed-order"), **budget)
    assert compute_epsilon(bins.releases(), 1e-6) <= 4.0
    less = replace(bins, noise_multiplier=bins.noise_multiplier / 1.0025)
    assert compute_epsilon(less.releases(), 1e-6) > 4.0
    assert bins.error < 0.85 * order.error


def test_more_noise_never_costs_more():
    epsilons = [
        compute_epsilon(run_of(BandedInverse(bands=3), noise_multiplier=sigma).releases(), 1e-5)
        for sigma in (0.5, 0.8, 0.8005, 1.0, 3.0)
    ]
    assert epsilons == sorted(epsilons, reverse=True)


def test_the_failure_is_part_of_delta():
    release = run_of(BandedInverse(bands=3), noise_multiplier=1.0).release(0)
    assert compute_epsilon(((release, 1),), 1e-12) == math.inf
    assert compute_epsilon(((release, 1),), 2e-11) < math.inf


def test_branches_share_their_bins_and_first_steps_cost_the_run():
    scheme = run_of(BandedInverse(bands=3), noise_multiplier=1.0).scheme
    spans = [Span("run", start, stop, scheme.release, False) for start, stop in ((0, 4), (2, 4), (3, 4))]
    assert scheme.cost(spans[:1]) == Counter([scheme.release])
    assert scheme.cost(spans) == Counter([replace(scheme.release, noise_multiplier=1 / math.sqrt(3))])
    assert scheme.cost([replace(spans[0], stop=1)]) == Counter([scheme.release])
    assert scheme.cost([]) == Counter()


def test_other_releases_compose_with_it():
    release, plain = run_of(BandedInverse(bands=3), noise_multiplier=1.0).release(0), Release(2.0, 1.0, 40)
    alone, both, twice = (
        compute_epsilon(counts, 1e-5) for counts in (((release, 1),), ((release, 1), (plain, 1)), ((release, 2),))
    )
    assert alone < both < twice
    assert both < alone + compute_epsilon(((plain, 1),), 1e-5)


def test_the_release_survives_json():
    release = run_of(BandedInverse(bands=3), noise_multiplier=1.0).release(0)
    span = Span("run", 0, 4, release, False)
    assert Span.parse(json.loads(json.dumps(asdict(span)))) == span


def test_what_is_not_analysed_is_refused():
    with pytest.raises(AccountingError, match=r"balls-in-bins.*accountant='pld'"):
        compute_epsilon(run_of(BandedInverse(bands=3), noise_multiplier=1.0).releases(), 1e-5, "rdp")
    with pytest.raises(ConfigurationError, match="adaptive_clipping"):
        run_of(BandedInverse(bands=3), quantile_counts=1)
    with pytest.raises(ConfigurationError, match=r"at most 16384 steps an epoch"):
        run_of(BandedInverse(bands=3), batch_size=1, samples=20_000)
    with pytest.raises(ConfigurationError, match="overlaps"):
        Release(1.0, 1.0, 40, allocated_steps=4, overlaps=(1.0, 0.5))


@pytest.mark.filterwarnings("ignore:target_delta")
@pytest.mark.parametrize(
    ("epsilon", "removed", "added"),
    [
        (2.0, (0.0099043, 0.00019864), (0.0090165, 0.000188)),
        (3.0, (0.00039256, 0.00003607), (0.0003359, 0.00003414)),
    ],
)
def test_epsilon_is_at_least_what_jax_privacy_draws(epsilon, removed, added):
    """Delta and its deviation, by 100,000 losses of jax-privacy 2.0.0 (experimental/monte_carlo, seed 1).

    It draws from lower triangular columns, BISR with p = 4, three epochs of 8 steps, noise of deviation 2. False alarms
    below 1e-8: six deviations.
    """
    run = run_of(BandedInverse(bands=4), samples=80, steps=24, noise_multiplier=1.0)
    run = replace(run, noise_multiplier=2.0 / run.sensitivity)
    worst = max(mean - 6 * deviation for mean, deviation in (removed, added))
    charged = compute_epsilon(run.releases(), worst)
    assert epsilon < charged < 1.4 * epsilon + 0.2
