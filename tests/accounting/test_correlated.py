"""Runs with correlated noise: their releases, epsilon, and error over that of DP-SGD."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dpshard.accounting import Release, SampledMechanism, calibrate, compute_epsilon
from dpshard.accounting.mechanism import independent_error
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF, explicit, inverse
from dpshard.noise.workloads import Workload
from tests.accounting.ledgers import delta_of_gaussian

E2E = {"sample_size": 42_061, "batch_size": 1024, "steps": 410}, {"target_epsilon": 8, "target_delta": 8e-6}
ONE_EPOCH = {"sample_size": 1_000_000, "batch_size": 1024, "steps": 976}, {"target_epsilon": 8, "target_delta": 1e-7}
THREE_EPOCHS = {"sample_size": 200_000, "batch_size": 2048, "steps": 293}, {"target_epsilon": 1, "target_delta": 1e-6}
DP_SGD = {id(E2E): 0.68250, id(ONE_EPOCH): 0.43357, id(THREE_EPOCHS): 1.12224}
"""Noise multipliers of DP-SGD with Poisson sampling within these budgets."""


def run_of(correlation, sampling, *, sample_size, batch_size, steps, **facts):
    schedule = BatchSchedule((batch_size,) * steps)
    return SampledMechanism(
        schedule=schedule, sample_size=sample_size, sampling=sampling, noise_correlation=correlation, **facts
    )


def matrix(series):
    return np.tril(toeplitz(series))


def root(bands):
    """BandMF with the coefficients of (1 - x)^(-1/2)."""
    return BandMF(bands=bands, coefficients=tuple(inverse(BandedInverse(bands=bands).noising(bands), bands)))


def over_dp_sgd(run, setting):
    return run.error / independent_error(DP_SGD[id(setting)], run.schedule.steps, run.workload)


@pytest.mark.parametrize(
    ("setting", "bands", "ratio"),
    [(E2E, 16, 0.731), (ONE_EPOCH, 256, 0.223), (ONE_EPOCH, 16, 0.366), (THREE_EPOCHS, 64, 1.683)],
)
def test_figures_of_banded_inverse(setting, bands, ratio):
    length, budget = setting
    run = calibrate(run_of(BandedInverse(bands=bands), "fixed-order", **length), **budget)
    assert over_dp_sgd(run, setting) == pytest.approx(ratio, abs=6e-4)


@pytest.mark.parametrize(
    ("setting", "bands", "ratio", "with_momentum"),
    [
        (E2E, 2, 0.781, 0.536),
        (E2E, 16, 0.698, 0.526),
        (ONE_EPOCH, 2, 0.348, 0.174),
        (ONE_EPOCH, 16, 0.242, 0.166),
        (ONE_EPOCH, 256, 0.223, 0.156),
        (THREE_EPOCHS, 16, 1.640, 1.081),
    ],
)
def test_figures_of_optimised_inverses(setting, bands, ratio, with_momentum):
    """Noise in prefix sums, and in a model under momentum 0.9, over that of DP-SGD in the same sums."""
    length, budget = setting
    for workload, expected in ((Workload(), ratio), (Workload(momentum=0.9), with_momentum)):
        run = run_of(BandedInverse(bands=bands, workload=workload), "fixed-order", **length)
        assert over_dp_sgd(calibrate(run, **budget), setting) == pytest.approx(expected, abs=1.5e-3)


@pytest.mark.parametrize(
    ("setting", "bands", "sigma", "with_momentum"),
    [(E2E, 32, 1.80618, 0.517), (ONE_EPOCH, 256, 0.83144, 0.198), (THREE_EPOCHS, 4, 1.84610, 0.828)],
)
def test_figures_of_band_mf_for_momentum(setting, bands, sigma, with_momentum):
    correlation = BandMF(bands=bands, workload=Workload(momentum=0.9))
    run = run_of(correlation, "cyclic-poisson", **setting[0], noise_multiplier=sigma)
    assert over_dp_sgd(run, setting) == pytest.approx(with_momentum, abs=1.5e-3)


@pytest.mark.parametrize(
    ("setting", "bands", "sigma", "by_root", "optimised"),
    [
        (E2E, 32, 1.80618, 0.696, 0.660),
        (ONE_EPOCH, 256, 0.83144, 0.279, 0.277),
        (THREE_EPOCHS, 4, 1.84610, 0.929, 0.864),
    ],
)
def test_figures_of_band_mf(setting, bands, sigma, by_root, optimised):
    for correlation, ratio in ((root(bands), by_root), (BandMF(bands=bands), optimised)):
        run = run_of(correlation, "cyclic-poisson", **setting[0], noise_multiplier=sigma)
        assert over_dp_sgd(run, setting) == pytest.approx(ratio, abs=6e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setting", "bands", "sigma"), [(E2E, 32, 1.80618), (ONE_EPOCH, 256, 0.83144), (THREE_EPOCHS, 4, 1.84610)]
)
def test_figures_have_the_same_epsilon(setting, bands, sigma):
    length, budget = setting
    run = calibrate(run_of(BandMF(bands=bands), "cyclic-poisson", **length), **budget)
    assert run.noise_multiplier == pytest.approx(sigma, rel=1e-4)
    plain = SampledMechanism(schedule=run.schedule, sample_size=run.sample_size)
    assert calibrate(plain, **budget).noise_multiplier == pytest.approx(DP_SGD[id(setting)], rel=1e-4)


@pytest.mark.parametrize("correlation", [BandedInverse(bands=1), BandedInverse(bands=5), BandMF(bands=6)], ids=repr)
def test_a_fixed_order_is_one_gaussian_of_its_columns(correlation):
    """17 steps, separation 5: a sample in the first step is in the steps 0, 5, 10, 15."""
    length = {"sample_size": 53, "batch_size": 10, "steps": 17}
    run = run_of(correlation, "fixed-order", **length, noise_multiplier=0.7)
    moved = matrix(correlation.strategy(17))[:, [0, 5, 10, 15]].sum(1)
    assert run.sensitivity == pytest.approx(np.linalg.norm(moved))
    epsilon = compute_epsilon(run.releases(), 1e-6)
    assert delta_of_gaussian(1 / 0.7, epsilon) == pytest.approx(1e-6, rel=1e-6)
    assert delta_of_gaussian(1 / 0.7, epsilon) <= 1e-6


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12, 1e-15])
@pytest.mark.parametrize("sigma", [0.06, 1.0, 30.0, 3000.0])
def test_epsilon_of_one_gaussian_is_exact(sigma, delta):
    epsilon = compute_epsilon(((Release(sigma, 1.0, 2), 1),), delta)
    assert delta_of_gaussian(1 / sigma, epsilon) <= delta + 2e-16
    if epsilon > 1e-10 and delta >= 1e-12:
        assert delta_of_gaussian(1 / sigma, epsilon) > 0.999 * delta


def test_the_first_steps_of_a_fixed_order_cost_what_they_move():
    run = run_of(BandedInverse(bands=4), "fixed-order", sample_size=50, batch_size=10, steps=17, noise_multiplier=0.7)
    epsilons = [compute_epsilon(run.releases(steps), 1e-6) for steps in range(1, 18)]
    assert all(a <= b for a, b in itertools.pairwise(epsilons))
    assert epsilons[0] < 0.5 * epsilons[-1]
    assert run.releases(17) == run.releases() == run.releases(99)
    noise = 0.7 * run.sensitivity  # of z, over max_grad_norm
    assert epsilons[0] == pytest.approx(compute_epsilon(((Release(noise, 1.0, 50), 1),), 1e-6))


@pytest.mark.parametrize(
    ("sampling", "separation"), [("fixed-order", 10), ("balls-in-bins", 11), ("cyclic-poisson", 40)]
)
def test_weights_are_optimised_for_the_participations_of_the_sampling(sampling, separation):
    """1,090 samples in batches of 100: at least 10 steps apart, or 11 on average, or once in a turn."""
    correlation = BandMF(bands=4, workload=Workload(momentum=0.9))
    run = run_of(correlation, sampling, sample_size=1090, batch_size=100, steps=40, noise_multiplier=1.0)
    assert run.correlation == explicit(correlation, 40, separation)
    assert run.error > 0


@pytest.mark.parametrize(("samples", "batch"), [(53, 10), (50, 10), (59, 10), (10, 10), (7, 3)])
def test_every_order_keeps_the_separation(samples, batch):
    """A cyclic order, or epochs with or without their last, smaller batch."""
    steps, least = 40, samples // batch
    rounds = np.arange(steps * batch).reshape(steps, batch) % samples
    whole = [[*range(first, first + batch)] for first in range(0, least * batch, batch)]
    rest = [[*range(least * batch, samples)]] if samples % batch else []
    for order in (rounds, (whole * steps)[:steps], ((whole + rest) * steps)[:steps]):
        for sample in range(samples):
            at = [step for step, members in enumerate(order) if sample in members]
            assert all(b - a >= least for a, b in itertools.pairwise(at))


@pytest.mark.parametrize(("samples", "batch", "epochs"), [(53, 10, 1), (59, 10, 3), (50, 10, 2), (7, 3, 4)])
def test_epochs_of_a_fixed_order_are_charged_once_each(samples, batch, epochs):
    """Rounded up, the last steps would hold some samples once more, and the sensitivity would count it for all."""
    schedule = BatchSchedule.parse(batch, sample_size=samples, epochs=epochs, sampling="fixed-order")
    assert schedule.steps == epochs * (samples // batch)
    run = SampledMechanism(schedule=schedule, sample_size=samples, sampling="fixed-order", noise_multiplier=1.0)
    assert run.sensitivity == pytest.approx(math.sqrt(epochs))
    rounds = np.arange(schedule.steps * batch) % samples
    assert np.bincount(rounds).max() <= epochs


def test_cyclic_sampling_composes_the_turns_of_a_group():
    length = {"sample_size": 1000, "batch_size": 50, "steps": 17}
    run = run_of(BandMF(bands=5), "cyclic-poisson", **length, noise_multiplier=1.5)
    assert run.releases() == ((Release(1.5, 0.25, 1000), 4),)
    assert run.releases(5) == ((Release(1.5, 0.25, 1000), 1),)
    assert run.sensitivity == pytest.approx(np.linalg.norm(matrix(run.noise_correlation.strategy(17))[:, 0]))
    plain = SampledMechanism(schedule=run.schedule, sample_size=1000, noise_multiplier=1.5)
    assert replace(run, noise_correlation=BandMF(bands=1)).releases() == plain.releases()


def test_epsilon_of_cyclic_sampling_is_that_of_its_mixtures():
    """Two turns, each with probability q b: the outputs are mixtures, integrated along the two columns."""
    sigma, probability, epsilon = 0.9, 0.3, 1.0
    length = {"sample_size": 20, "batch_size": 3, "steps": 4}
    run = run_of(BandMF(bands=2, coefficients=(1, 0.5)), "cyclic-poisson", **length, noise_multiplier=sigma)
    C = matrix(run.noise_correlation.strategy(4))[:, [0, 2]]
    std = sigma * run.sensitivity
    x = np.linspace(-9, 10, 801)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"))  # along the two columns, in standard deviations of z
    directions = C / np.linalg.norm(C, axis=0)
    assert directions.T @ directions == pytest.approx(np.eye(2))

    def density(weights):
        total = np.zeros(grid.shape[1:])
        for chosen, weight in weights.items():
            mean = directions.T @ C @ np.array(chosen) / std
            total += weight * np.exp(-((grid - mean[:, None, None]) ** 2).sum(0) / 2) / (2 * math.pi)
        return total

    q = probability
    drawn = density({(0, 0): (1 - q) ** 2, (1, 0): q * (1 - q), (0, 1): q * (1 - q), (1, 1): q**2})
    blank = density({(0, 0): 1.0})
    cell = (x[1] - x[0]) ** 2
    delta = max(
        np.maximum(p - math.exp(epsilon) * other, 0).sum() * cell for p, other in ((drawn, blank), (blank, drawn))
    )
    assert compute_epsilon(run.releases(), float(delta)) == pytest.approx(epsilon, abs=1e-3)


def test_calibration_is_conservative_and_tight():
    run = run_of(BandedInverse(bands=4), "fixed-order", sample_size=5000, batch_size=50, steps=300)
    run = calibrate(run, target_epsilon=2, target_delta=1e-6)
    assert compute_epsilon(run.releases(), 1e-6) <= 2
    less = replace(run, noise_multiplier=run.noise_multiplier * (1 - 1e-4))
    assert compute_epsilon(less.releases(), 1e-6) > 2


@pytest.mark.parametrize(
    ("correlation", "sampling", "message"),
    [
        (BandedInverse(bands=4), "cyclic-poisson", r"needs BandMF.*fixed-order"),
        (BandMF(bands=11), "cyclic-poisson", r"at most 10 bands"),
        (BandMF(bands=4), "poisson", "cannot be analysed"),
        (BandMF(bands=101), "cyclic-poisson", "at most 100 bands, or more steps"),
        (BandedInverse(bands=101), "fixed-order", "at most 100 bands, or more steps"),
    ],
)
def test_what_is_not_analysed_is_refused(correlation, sampling, message):
    with pytest.raises(ConfigurationError, match=message):
        run_of(correlation, sampling, sample_size=500, batch_size=50, steps=100)


def test_batch_schedules_are_refused():
    schedule = BatchSchedule((50, 100))
    with pytest.raises(ConfigurationError, match="one batch size in all steps"):
        SampledMechanism(schedule=schedule, sample_size=500, sampling="fixed-order")


def test_batches_that_are_larger_than_the_data_set_are_refused():
    with pytest.raises(ConfigurationError, match="batch_size=60 is more than sample_size=50"):
        run_of(BandedInverse(bands=4), "fixed-order", sample_size=50, batch_size=60, steps=10)
