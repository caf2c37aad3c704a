"""What a release may be."""

import math

import pytest

from dpshard.accounting import PrivacyLedger, Release, poisson_relation, relation_name, rounded_up
from dpshard.errors import ConfigurationError


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.inf},
        {"sampling_probability": 0.0},
        {"sampling_probability": 1.1},
        {"sample_size": 0},
        {"max_batch_size": 0},
        {"sample_size": None},
    ],
)
def test_impossible_releases_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Release(**({"noise_multiplier": 1.0, "sampling_probability": 0.1, "sample_size": 10} | wrong))


def test_a_printed_epsilon_never_promises_too_much():
    assert rounded_up(2.00001) == "2.0001"
    assert rounded_up(2.00001, 3) == "2.001"
    assert rounded_up(1.1) == "1.1000"
    assert "not private" in rounded_up(math.inf)


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0, 1.3])
def test_the_statement_of_a_ledger_rounds_as_everything_else(noise_multiplier):
    ledger = PrivacyLedger()
    ledger.record(Release(noise_multiplier, 0.1, 100))
    assert f"epsilon = {rounded_up(ledger.epsilon(1e-5))} at" in ledger.statement(1e-5)


@pytest.mark.parametrize("cap", [None, 20])
def test_the_relation_of_a_plan_is_that_of_its_releases(cap):
    ledger = PrivacyLedger()
    ledger.record(Release(1.0, 0.1, 100, cap))
    assert ledger.relation == relation_name(poisson_relation(cap))
