"""What a release may be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpshard.accounting import PrivacyLedger, Release, rounded_up
from dpshard.accounting.releases import in_figures
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
    assert rounded_up(1.00000000004) == "1.0001"
    assert rounded_up(0.0) == "0.0000"
    assert rounded_up(3e-11) == "3.000e-11"


@given(st.floats(min_value=0, exclude_min=True, max_value=1e9))
def test_what_is_printed_is_what_is_spent_but_for_the_last_bits(value):
    printed = float(rounded_up(value))
    assert value - 4 * math.ulp(value) <= printed <= max(1.002 * value, value + 1.1e-4)


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0, 1.3])
def test_the_statement_of_a_ledger_rounds_as_everything_else(noise_multiplier):
    ledger = PrivacyLedger()
    ledger.record(Release(noise_multiplier, 0.1, 100))
    assert f"epsilon = {rounded_up(ledger.epsilon(1e-5))} at" in ledger.statement(1e-5)


@pytest.mark.parametrize("cap", [None, 20])
def test_the_relation_of_a_plan_is_that_of_its_releases(cap):
    ledger = PrivacyLedger()
    ledger.record(Release(1.0, 0.1, 100, cap))
    assert ledger.relation == ("add-or-remove-one" if cap is None else "replace-special")


@pytest.mark.parametrize("samples", [300, 1100, 42_061, 60_000, 346_000_000])
def test_a_statement_shows_no_smaller_delta_than_it_holds_at(samples):
    """1 / 2200 to 6 figures is 0.000454545, which is less."""
    delta = 1 / (2 * samples)
    shown = PrivacyLedger().statement(delta).split("at delta = ")[1].split()[0]
    assert delta <= float(shown) <= delta * (1 + 1e-5)
    assert (in_figures(1e-5), in_figures(0.25)) == ("1e-05", "0.25")
