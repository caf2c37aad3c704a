"""The noise and the number of steps that fit a budget.

PITFALLS rows: 22 test_calibration_is_conservative_and_tight, test_calibration_by_pld_is_conservative_and_tight.
Published figures: DP-BERT (Anil et al. 2021, Table 2 setting).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpshard.accounting import calibrate_noise_multiplier, calibration, compute_epsilon, steps_for_epsilon
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError
from tests.accounting.ledgers import BUDGET

BERT = {"sample_size": 346_000_000, "target_epsilon": 5.36, "target_delta": 2.89e-9}


def test_figure_of_calibration():
    sigma = calibrate_noise_multiplier([(100, 1000)], sample_size=10_000, **BUDGET)
    assert round(sigma, 4) == 1.4146


@pytest.mark.parametrize(
    ("accountant", "batch_size", "sigma"),
    [
        ("rdp", 65_536, 0.5227),
        ("rdp", 2_097_152, 1.2151),
        pytest.param("pld", 65_536, 0.4944, marks=pytest.mark.slow),
        ("pld", 2_097_152, 1.1752),
    ],
)
def test_figure_of_bert(accountant, batch_size, sigma):
    found = calibrate_noise_multiplier([(batch_size, 20_000)], **BERT, accountant=accountant)
    assert round(found, 4) == sigma


@given(batch_size=st.integers(1, 500), steps=st.integers(1, 2000), target_epsilon=st.floats(0.1, 20))
@settings(max_examples=10, deadline=None)
def test_calibration_is_conservative_and_tight(batch_size, steps, target_epsilon):
    run = {"sample_size": 1000, "target_delta": 1e-6, "accountant": "rdp"}
    phases = [(batch_size, steps), (min(1000, 2 * batch_size), 10)]
    sigma = calibrate_noise_multiplier(phases, target_epsilon=target_epsilon, **run)
    assert compute_epsilon(phases, noise_multiplier=sigma, **run) <= target_epsilon
    assert sigma == calibration.MIN_SIGMA or (
        compute_epsilon(phases, noise_multiplier=sigma * (1 - 1e-4), **run) > target_epsilon
    )


@pytest.mark.parametrize("max_batch_size", [None, pytest.param(160, marks=pytest.mark.slow)])
def test_calibration_by_pld_is_conservative_and_tight(max_batch_size):
    phases = BatchSchedule.parse([(50, 100), (100, 50)], sample_size=10_000).phases()
    run = {"sample_size": 10_000, "target_delta": 1e-5, "max_batch_size": max_batch_size}
    sigma = calibrate_noise_multiplier(phases, target_epsilon=0.7, **run)
    assert compute_epsilon(phases, noise_multiplier=sigma, **run) <= 0.7
    assert compute_epsilon(phases, noise_multiplier=sigma * (1 - 1e-4), **run) > 0.7


def test_unreachable_targets_are_refused():
    with pytest.raises(AccountingError, match="Allow a larger epsilon"):
        calibrate_noise_multiplier(
            [(10, 10)], sample_size=1000, target_epsilon=1e-6, target_delta=1e-9, accountant="rdp"
        )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_for_epsilon_is_the_last_that_fits(accountant):
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    run = {"noise_multiplier": 1.0, "sample_size": 10_000}
    steps = steps_for_epsilon(100, **run, **target, accountant=accountant)
    assert compute_epsilon([(100, steps)], **run, target_delta=1e-5, accountant=accountant) <= 1.0
    assert compute_epsilon([(100, steps + 1)], **run, target_delta=1e-5, accountant=accountant) > 1.0
    assert steps_for_epsilon(10_000, **run, **target, accountant=accountant) == 0
    with pytest.raises(AccountingError, match="the noise is far more"):
        steps_for_epsilon(1, noise_multiplier=1e4, sample_size=10**4, **target, accountant="rdp")
