"""The noise and the number of steps that fit a budget.

Failure modes: 22 test_calibration_is_conservative_and_tight, test_calibration_by_pld_is_conservative_and_tight.
Published figures: DP-BERT (Anil et al. 2021, Table 2 setting).
"""

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from dpshard.accounting import calibration
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError
from tests.accounting.ledgers import BUDGET, run_epsilon, run_sigma, run_steps

BERT = {"sample_size": 346_000_000, "target_epsilon": 5.36, "target_delta": 2.89e-9}


def test_figure_of_calibration():
    sigma = run_sigma([(100, 1000)], sample_size=10_000, **BUDGET)
    assert round(sigma, 4) == 1.4146


@pytest.mark.parametrize(
    ("accountant", "batch_size", "sigma"),
    [
        ("rdp", 65_536, 0.5227),
        ("rdp", 2_097_152, 1.2151),
        pytest.param("pld", 65_536, 0.4944, marks=pytest.mark.exhaustive),
        ("pld", 2_097_152, 1.1752),
    ],
)
def test_figure_of_bert(accountant, batch_size, sigma):
    found = run_sigma([(batch_size, 20_000)], **BERT, accountant=accountant)
    assert round(found, 4) == sigma


@given(batch_size=st.integers(1, 500), steps=st.integers(1, 2000), target_epsilon=st.floats(0.1, 20))
@settings(max_examples=6, deadline=None)
def test_calibration_is_conservative_and_tight(batch_size, steps, target_epsilon):
    run = {"sample_size": 1000, "target_delta": 1e-6, "accountant": "rdp"}
    phases = [(batch_size, steps), (min(1000, 2 * batch_size), 10)]
    sigma = run_sigma(phases, target_epsilon=target_epsilon, **run)
    assert run_epsilon(phases, noise_multiplier=sigma, **run) <= target_epsilon
    assert sigma == calibration.MIN_SIGMA or (
        run_epsilon(phases, noise_multiplier=sigma * (1 - 1e-4), **run) > target_epsilon
    )


@pytest.mark.parametrize(
    ("schedule", "max_batch_size"),
    [
        ([(500, 100)], None),
        ([(500, 100), (1000, 50)], None),
        ([(500, 100), (1000, 50)], 1200),
    ],
)
def test_calibration_by_pld_is_conservative_and_tight(schedule, max_batch_size):
    """Large batches have much noise, so small losses and short distributions."""
    phases = BatchSchedule.parse(schedule, sample_size=10_000).phases()
    run = {"sample_size": 10_000, "target_delta": 1e-5, "max_batch_size": max_batch_size}
    sigma = run_sigma(phases, target_epsilon=0.7, **run)
    assert run_epsilon(phases, noise_multiplier=sigma, **run) <= 0.7
    assert run_epsilon(phases, noise_multiplier=sigma * (1 - 1e-4), **run) > 0.7


def test_noise_for_a_small_delta_and_many_steps_is_enough():
    sigma = run_sigma([(10_000, 100_000)], sample_size=10_000, target_epsilon=8, target_delta=1e-11)
    mu = math.sqrt(100_000) / sigma  # every sample in every step: one Gaussian
    delta = special.ndtr(mu / 2 - 8 / mu) - math.exp(8 + special.log_ndtr(-mu / 2 - 8 / mu))
    assert 1e-12 < delta <= 1e-11


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_no_budget_is_planned_by_an_approximation():
    run = {"sample_size": 10_000, "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "gdp"}
    with pytest.raises(AccountingError, match="Take accountant='pld'"):
        run_sigma([(10, 1000)], **run)
    with pytest.raises(AccountingError, match="Take accountant='pld'"):
        run_steps(10, noise_multiplier=0.5, **run)


def test_unreachable_targets_are_refused():
    with pytest.raises(AccountingError, match="Allow a larger epsilon"):
        run_sigma([(10, 10)], sample_size=1000, target_epsilon=1e-6, target_delta=1e-9, accountant="rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_for_epsilon_is_the_last_that_fits(accountant):
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    run = {"noise_multiplier": 1.0, "sample_size": 10_000}
    steps = run_steps(100, **run, **target, accountant=accountant)
    assert run_epsilon([(100, steps)], **run, target_delta=1e-5, accountant=accountant) <= 1.0
    assert run_epsilon([(100, steps + 1)], **run, target_delta=1e-5, accountant=accountant) > 1.0
    assert run_steps(10_000, **run, **target, accountant=accountant) == 0
    with pytest.raises(AccountingError, match="the noise is far more"):
        run_steps(1, noise_multiplier=1e4, sample_size=10**4, **target, accountant="rdp")


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.exhaustive)])
def test_the_increasing_schedule_of_bert_is_composed_phase_by_phase(accountant):
    """262K to 1M over 7.5K steps in steps of 196K: the figures of dp-accounting for the same events."""
    phases = [(262_144 + 196_608 * k, 1500) for k in range(4)] + [(1_048_576, 14_000)]
    # The smallest sufficient one. Processors round Fourier transforms differently, so "to four digits" would be a tie.
    sigma = {"rdp": 0.7965, "pld": 0.76905}[accountant]
    run = {"sample_size": BERT["sample_size"], "target_delta": BERT["target_delta"], "accountant": accountant}
    above, below = (run_epsilon(phases, noise_multiplier=sigma + d, **run) for d in (-1e-4, 1e-4))
    assert below <= BERT["target_epsilon"] < above
    theirs = {"rdp": RdpAccountant, "pld": PLDAccountant}[accountant]()
    for batch_size, steps in phases:
        gaussian = GaussianDpEvent(sigma)
        theirs.compose(PoissonSampledDpEvent(batch_size / BERT["sample_size"], gaussian), steps)
    epsilon = theirs.get_epsilon(BERT["target_delta"])
    assert run_epsilon(phases, noise_multiplier=sigma, **run) == pytest.approx(epsilon, rel=1e-3)
    # No single batch size suffices: the smallest under-states, the largest over-states.
    smallest, largest = (run_epsilon([(size, 20_000)], noise_multiplier=sigma, **run) for size in (262_144, 1_048_576))
    assert smallest < 0.95 * epsilon < epsilon < 0.99 * largest
