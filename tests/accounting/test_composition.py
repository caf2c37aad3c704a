"""Epsilon of composed releases, by all accountants.

Failure modes: 20 test_a_cap_is_accounted, test_epsilon_is_that_of_dp_accounting;
23 test_delta_above_one_over_n_warns, test_gdp_warns_once_that_it_may_under_state.
Published figures: Bu et al. 2020 (MNIST), dp-accounting itself.
"""

import math
import warnings

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpshard.accounting import PrivacyLedger, Release, bounds, composition
from dpshard.accounting.spans import Span
from dpshard.sampling import default_cap
from tests.accounting.ledgers import RELEASE, delta_of_gaussian, ledger_of, run_bound, run_epsilon, run_of

MNIST = {"noise_multiplier": 1.1, "sample_size": 60_000, "target_delta": 1e-5}


@pytest.mark.parametrize(("accountant", "epsilon"), [("pld", 1.8282), ("rdp", 2.1014)])
def test_figure_of_a_thousand_steps(accountant, epsilon):
    ledger = ledger_of(*[RELEASE] * 1000, accountant=accountant)
    assert round(ledger.epsilon(1e-5), 4) == epsilon


@pytest.mark.parametrize(("accountant", "epsilon"), [("pld", 2.3818), ("rdp", 2.5967)])
def test_figure_of_mnist(accountant, epsilon):
    assert round(run_epsilon([(256, 14_063)], **MNIST, accountant=accountant), 4) == epsilon


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13])
def test_many_steps_at_a_small_delta_are_bounded(delta):
    """All steps hold every sample, so together they are one Gaussian. A plain transform errs by 4e-12 here."""
    full = {"noise_multiplier": 100.0, "sample_size": 10_000}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound = run_bound([(10_000, 100_000)], **full, target_delta=delta)
    exact = delta_of_gaussian(math.sqrt(100_000) / 100, bound.epsilon)
    assert exact <= delta
    assert exact > 0.99 * delta
    assert bound.accountant == "pld"


def test_a_figure_of_another_accountant_is_named():
    ledger, release = PrivacyLedger(), Release(100.0, 1.0, 10_000)
    ledger.load_state_dict({"run": "", "steps": 100_000, "spans": [Span("", 0, 100_000, release, False).state_dict()]})
    assert "(accountant: pld)" in ledger.statement(1e-5)
    assert "(accountant: pld, and this figure is the tighter one of rdp)" in ledger.statement(1e-18)


def test_a_cap_has_a_bound_at_small_deltas():
    run = {"noise_multiplier": 2.0, "sample_size": 10_000, "max_batch_size": 200}
    at = [run_epsilon([(100, 10_000)], **run, target_delta=delta) for delta in (1e-8, 1e-12, 1e-16)]
    assert 0 < at[0] < at[1] < at[2] < 40
    assert at[2] - at[1] < 1.2 * (at[1] - at[0])


def test_a_cap_is_accounted():
    run = {"noise_multiplier": 1.0, "sample_size": 10_000_000, "target_delta": 1e-8}
    plain = run_epsilon([(65_536, 1000)], **run)
    loose = run_epsilon([(65_536, 1000)], **run, max_batch_size=default_cap(65_536))
    tight = run_epsilon([(65_536, 1000)], **run, max_batch_size=65_536)
    assert plain < loose < plain + 5e-4
    assert tight > plain + 5


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_dp_accounting(accountant):
    releases = [(RELEASE, 30), (Release(0.8, 0.05, 10_000), 20), (Release(2.0, 1.0, 10_000), 3)]
    reference = PLDAccountant() if accountant == "pld" else RdpAccountant()
    for release, count in releases:
        reference.compose(composition.event(release), count)
    ledger = ledger_of(*[r for r, n in releases for _ in range(n)], accountant=accountant)
    assert ledger.epsilon(1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.exhaustive
def test_epsilon_of_a_capped_release_is_that_of_dp_accounting():
    capped = Release(1.0, 0.01, 1000, max_batch_size=12)
    reference = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(composition.event(capped), 50)
    assert ledger_of(*[capped] * 50).epsilon(1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_grids_of_losses_fit_the_release():
    # dp-accounting's default interval, 1e-4, is a hundred times the loss of one step here and doubles epsilon.
    rare = [(10_000, 100_000)], {"noise_multiplier": 1.0, "sample_size": 10**9, "target_delta": 1e-10}
    renyi = run_epsilon(rare[0], **rare[1], accountant="rdp")
    default = PLDAccountant().compose(composition.event(Release(1.0, 1e-5, 10**9)), 100_000).get_epsilon(1e-10)
    assert run_epsilon(rare[0], **rare[1]) < 0.8 * min(default, renyi)
    # Hardly any noise: the losses need too much memory at any interval.
    assert run_epsilon([(100, 1000)], noise_multiplier=0.01, sample_size=10_000, target_delta=1e-5) == math.inf


@pytest.mark.exhaustive
def test_long_ramps_are_bounded_from_above():
    ramp = [(size, 1) for size in range(1000, 2000, 14)]
    run = {"noise_multiplier": 1.0, "sample_size": 100_000, "target_delta": 1e-6, "accountant": "rdp"}
    counts = run_of(ramp, noise_multiplier=1.0, sample_size=100_000).releases()
    exact = RdpAccountant()
    for release, count in counts:
        exact.compose(composition.event(release), count)
    assert exact.get_epsilon(1e-6) <= run_epsilon(ramp, **run) < 1.06 * exact.get_epsilon(1e-6)
    assert len(composition._merged(counts)) < composition.MAX_DISTINCT
    merged = sorted(r.sampling_probability for r, n in composition._merged(counts) for _ in range(n))
    assert all(above >= q for above, q in zip(merged, sorted(r.sampling_probability for r, _ in counts), strict=True))


def test_a_gdp_figure_is_the_central_limit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epsilon = run_epsilon([(256, 14_063)], **MNIST, accountant="gdp")
    mu = 256 / 60_000 * math.sqrt(14_063 * math.expm1(1.1**-2))
    assert epsilon == pytest.approx(dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5))
    assert epsilon < run_epsilon([(256, 14_063)], **MNIST)  # it under-states: hence the label
    for sigma in (0.01, 0.045):
        hardly_any = {"noise_multiplier": sigma, "sample_size": 1000, "target_delta": 1e-5}
        assert run_epsilon([(10, 10)], **hardly_any, accountant="gdp") == math.inf


def test_gdp_warns_once_that_it_may_under_state():
    bounds._warn_of_gdp.cache_clear()
    with pytest.warns(UserWarning, match="under-state"):
        ledger = PrivacyLedger("gdp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyLedger("gdp")
    assert "under-state" in ledger.statement(1e-5)


def test_delta_above_one_over_n_warns():
    with pytest.warns(UserWarning, match="1/N"):
        run_epsilon([(10, 1)], noise_multiplier=1.0, sample_size=100, target_delta=0.02, accountant="rdp")
