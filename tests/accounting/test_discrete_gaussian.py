"""What discrete Gaussian noise costs: by the accountant, and summed up point by point.

Failure modes: 20 test_divergences_are_at_most_what_is_accounted, test_what_is_not_proved_is_refused;
22 test_calibration_keeps_to_the_budget.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp import compute_epsilon as compute_epsilon_of_rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import comb, logsumexp

from dpshard.accounting import (
    PrivacyLedger,
    Release,
    Search,
    composition,
)
from dpshard.errors import AccountingError, ConfigurationError
from tests.accounting.ledgers import RELEASE, ledger_of, run_epsilon, run_sigma, run_steps

DISCRETE = replace(RELEASE, discretized_elements=10**9)
RUN = {"noise_multiplier": 1.0, "sample_size": 10_000, "target_delta": 1e-5, "accountant": "rdp"}


def log_moments(v, s, q, order):
    """log sum of M^a Q^(1 - a) and of Q^a M^(1 - a) over Z^2, M = (1 - q) Q + q P, P shifted by `v`; [Note: Discrete
    Gaussian noise under sampling]. The range holds what the order and the shift ask for."""
    reach = math.ceil(order * max(map(abs, v)) + 12 * s)
    y = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2), axis=-1)
    log_q = -np.square(y).sum(-1) / (2 * s**2)
    log_q -= logsumexp(log_q)
    log_p = -np.square(y - np.array(v)).sum(-1) / (2 * s**2)
    log_p -= logsumexp(log_p)
    log_m = np.logaddexp(np.log1p(-q) + log_q, np.log(q) + log_p) if q < 1 else log_p
    return [float(logsumexp(a * one + (1 - a) * two)) for a, one, two in ((order, log_m, log_q), (order, log_q, log_m))]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    v=st.tuples(st.integers(-3, 3), st.integers(0, 3)).filter(any),
    s=st.floats(0.8, 4.0),
    q=st.one_of(st.floats(1e-3, 1.0), st.just(1.0)),
    order=st.integers(2, 6),
)
def test_divergences_are_at_most_what_is_accounted(v, s, q, order):
    """With and without the sample, in both directions, and with noise as coarse as the shift."""
    release = Release(s / math.hypot(*v), q, 1000, discretized_elements=1)
    gaussian = composition.event(replace(release, discretized_elements=None))
    charged = RdpAccountant([order]).compose(gaussian).rdp[0] * (order - 1)
    with_over_without, without_over_with = log_moments(v, s, q, order)
    assert with_over_without == pytest.approx(charged, rel=1e-6, abs=1e-9)
    assert without_over_with <= with_over_without + 1e-9


@settings(max_examples=300, deadline=None, derandomize=True)
@given(log_r=st.floats(0, 30), q=st.floats(0, 1), a=st.floats(1, 64))
def test_the_inequality_of_the_proof(log_r, q, a):
    """u^a + r w^a >= u^(1 - a) + r w^(1 - a), by logarithms."""
    r = math.exp(log_r)
    u, w = 1 - q + q * r, 1 - q + q / r
    larger = np.logaddexp(a * math.log(u), log_r + a * math.log(w))
    smaller = np.logaddexp((1 - a) * math.log(u), log_r + (1 - a) * math.log(w))
    assert larger >= smaller - 1e-9 * max(1.0, abs(larger), abs(smaller))


def zhu_wang(q, sigma, order):
    """Bound the Renyi divergence, under Poisson sampling, of mechanisms with divergences a / (2 sigma^2).

    Zhu and Wang 2019, Thm. 5.
    """
    terms = [(order - 1) * math.log1p(-q) + math.log(order * q - q + 1)]
    for j in range(2, order + 1):
        factor = comb(order, j, exact=True) * (1 if j == 2 else 3)
        terms.append(math.log(factor) + (order - j) * math.log1p(-q) + j * math.log(q) + j * (j - 1) / (2 * sigma**2))
    return float(logsumexp(terms)) / (order - 1)


@pytest.mark.parametrize(
    ("release", "near"),
    [
        (DISCRETE, 1.02),
        (replace(DISCRETE, noise_multiplier=2.0, sampling_probability=1.0), 1.05),
        (replace(DISCRETE, noise_multiplier=0.6, sampling_probability=0.2), 1.2),  # epsilon above 30: orders 2 and 3
    ],
)
def test_epsilon_is_between_the_gaussian_and_the_general_bound(release, near):
    whole = [order for order in RdpAccountant().orders if order == int(order)]
    sigma = release.accounted_noise_multiplier
    general = 50 * np.array([zhu_wang(min(release.sampling_probability, 1 - 1e-12), sigma, int(a)) for a in whole])
    gaussian = ledger_of(*[replace(release, discretized_elements=None)] * 50, accountant="rdp").epsilon(1e-5)
    found = ledger_of(*[release] * 50, accountant="rdp").epsilon(1e-5)
    assert gaussian < found <= compute_epsilon_of_rdp(whole, general, 1e-5)[0] * (1 + 1e-9)
    assert found < near * gaussian


def test_whole_orders_alone_are_used():
    orders = composition._orders(((RELEASE, 1), (DISCRETE, 1)))
    assert {2, 3, 10, 11, 63, 1024} <= set(orders)
    assert all(order == int(order) for order in orders)
    assert {1.5, 2.5} <= set(composition._orders(((RELEASE, 1),)))
    # With hardly any privacy, the best order would be between 1 and 2.
    loud = {**RUN, "noise_multiplier": 0.2}
    assert run_epsilon([(100, 500)], **loud, discretized_elements=1) > 1.1 * run_epsilon([(100, 500)], **loud)


@pytest.mark.parametrize(
    ("elements", "noise_multiplier", "accounted"),
    [
        (1, 1.0, 1 / (1 + 1.03125 * 2**-24)),
        (2**30, 1.0, 1 / (1 + 1.03125 * 2**-9)),
        (2**30, 4.0, 4 / (1 + 4.125 * 2**-9)),
    ],
)
def test_rounding_is_charged(elements, noise_multiplier, accounted):
    release = Release(noise_multiplier, 0.01, 10_000, discretized_elements=elements)
    assert release.accounted_noise_multiplier == pytest.approx(accounted, rel=1e-14)
    assert replace(release, discretized_elements=None).accounted_noise_multiplier == noise_multiplier


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sigma=st.floats(0.5, 5),
    batch=st.integers(1, 9000),
    steps=st.integers(1, 1000),
    elements=st.integers(1, 10**11),
    more=st.floats(1.05, 3),
)
def test_epsilon_is_monotone(sigma, batch, steps, elements, more):
    def epsilon(sigma, batch, steps, elements):
        return run_epsilon([(batch, steps)], **{**RUN, "noise_multiplier": sigma}, discretized_elements=elements)

    base, tolerance = epsilon(sigma, batch, steps, elements), 1e-9
    assert epsilon(sigma * more, batch, steps, elements) <= base + tolerance
    assert epsilon(sigma, min(10_000, math.ceil(batch * more)), steps, elements) >= base - tolerance
    assert epsilon(sigma, batch, math.ceil(steps * more), elements) >= base - tolerance
    assert epsilon(sigma, batch, steps, math.ceil(elements * more)) >= base - tolerance


@pytest.mark.parametrize("elements", [1, 10**9, 10**13])
def test_calibration_keeps_to_the_budget(elements):
    run = {key: RUN[key] for key in ("sample_size", "target_delta", "accountant")} | {"discretized_elements": elements}
    sigma = run_sigma([(100, 500)], target_epsilon=2.0, **run)
    assert 2.0 * 0.999 < run_epsilon([(100, 500)], noise_multiplier=sigma, **run) <= 2.0
    steps = run_steps(100, noise_multiplier=sigma, target_epsilon=2.0, **run)
    assert 500 <= steps <= 505
    plain = run_sigma([(100, 500)], target_epsilon=2.0, **(run | {"discretized_elements": None}))
    assert sigma > plain
    assert sigma < (1.003 if elements < 10**12 else 2) * plain


def test_more_elements_than_a_grid_bears_are_refused():
    run = {key: RUN[key] for key in ("sample_size", "target_delta", "accountant")} | {"discretized_elements": 10**16}
    with pytest.raises(AccountingError, match="No noise multiplier"):
        run_sigma([(100, 500)], target_epsilon=2.0, **run)


def test_a_search_is_charged():
    search = Search(10.0)
    discrete = run_epsilon([(100, 500)], **RUN, discretized_elements=10**9, search=search)
    gaussian = run_epsilon([(100, 500)], **RUN, search=search)
    assert gaussian < discrete < 1.05 * gaussian


@pytest.mark.parametrize(
    ("release", "accountant", "message"),
    [
        (DISCRETE, "pld", "'pld' cannot analyse discrete.*rdp"),
        (DISCRETE, "gdp", "'gdp' cannot analyse discrete.*rdp"),
        (replace(DISCRETE, max_batch_size=200), "rdp", "drop max_batch_size=200"),
        (replace(DISCRETE, max_batch_size=200), "pld", "cannot analyse discrete"),
        (replace(DISCRETE, quantile_counts=2), "rdp", "counts of adaptive_clipping"),
    ],
)
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_what_is_not_proved_is_refused(release, accountant, message):
    with pytest.raises(AccountingError, match=message):
        ledger_of(release, accountant=accountant)


@pytest.mark.parametrize("elements", [0, -1, 1.5, True, "9"])
def test_impossible_numbers_of_elements_are_refused(elements):
    with pytest.raises(ConfigurationError, match=r"discretized_elements=.*positive int"):
        replace(RELEASE, discretized_elements=elements)


def test_a_ledger_keeps_the_kinds_of_noise_apart():
    ledger = ledger_of(DISCRETE, RELEASE, DISCRETE, accountant="rdp")
    again = PrivacyLedger("rdp")
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.state_dict() == ledger.state_dict()
    assert again.epsilon(1e-5) == ledger.epsilon(1e-5)
    assert "3 releases with discrete Gaussian noise under" in again.statement(1e-5)
    old = json.loads(json.dumps(ledger_of(RELEASE).state_dict()))
    del old["spans"][0]["release"]["discretized_elements"]  # a ledger from before there was another kind
    again.load_state_dict(old)
    assert again.state_dict() == ledger_of(RELEASE).state_dict()
