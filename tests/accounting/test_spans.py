"""Copies of a step draw the same batch: they cost more than as many steps that draw their own."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from dpshard.accounting import PrivacyLedger, Release, compute_epsilon
from dpshard.accounting.spans import Span, append, cost, total_cost
from dpshard.errors import AccountingError
from tests.accounting.ledgers import RELEASE

LOUD = Release(0.7, 0.01, 10_000)


def again(ledger, step, release=LOUD, **facts):
    ledger.charge(step, release, **facts)
    return ledger


def delta_of_two_sums_of_one_batch(epsilon, sigma, q):
    """By a sum over a grid of the two sums' plane: a sample is in both batches, or in neither."""
    x = np.linspace(-8 * sigma, 1 + 8 * sigma, 801)
    without = np.outer(norm.pdf(x, 0, sigma), norm.pdf(x, 0, sigma))
    with_it = (1 - q) * without + q * np.outer(norm.pdf(x, 1, sigma), norm.pdf(x, 1, sigma))
    cell, pairs = (x[1] - x[0]) ** 2, ((with_it, without), (without, with_it))
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) * cell for a, b in pairs)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_two_copies_cost_what_their_joint_distribution_does(accountant):
    ledger = again(again(PrivacyLedger(accountant), 0), 0)
    delta = 1e-5
    epsilon = ledger.epsilon(delta)
    assert delta_of_two_sums_of_one_batch(1.001 * epsilon, 0.7, 0.01) <= delta
    if accountant == "pld":
        assert delta_of_two_sums_of_one_batch(0.99 * epsilon, 0.7, 0.01) > delta
        with_own_batches = compute_epsilon(((LOUD, 2),), delta)
        assert delta_of_two_sums_of_one_batch(with_own_batches, 0.7, 0.01) > 20 * delta


spans = st.lists(
    st.builds(
        lambda run, start, n, fed: Span(run, start, start + n, RELEASE, fed),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.integers(1, 9),
        st.booleans(),
    ),
    max_size=6,
)


@given(spans)
def test_a_total_is_that_of_its_steps(spans):
    by_step = Counter()
    for run in "ab":
        for step in range(20):
            by_step += cost(span for span in spans if span.covers(run, step))
    assert total_cost(spans) == by_step


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.booleans()), max_size=12))
def test_a_ledger_charges_step_by_step_what_all_cost_together(charges):
    ledger, spans = PrivacyLedger(), []
    for run, step, fed in charges:
        ledger.run = run
        ledger.charge(step, RELEASE, unverified_sampling=fed)
        append(spans, run, step, RELEASE, unverified_sampling=fed)
    assert ledger._cost == total_cost(spans)
    assert ledger.releases == len(charges)


def test_copies_halve_the_variance_of_their_noise():
    discrete = replace(LOUD, discretized_elements=100)
    for release in (LOUD, replace(LOUD, max_batch_size=160, quantile_counts=2), discrete):
        ((joint, count),) = cost([Span("", 0, 1, release, False)] * 4).items()
        assert (count, joint.noise_multiplier) == (1, 0.35)
        assert joint.accounted_noise_multiplier == pytest.approx(release.accounted_noise_multiplier / 2, rel=1e-15)
        assert joint.sampling_probability == release.sampling_probability


def partitions(k, most):
    if k == 0:
        yield []
    for part in range(min(k, most), 0, -1):
        for rest in partitions(k - part, part):
            yield [part, *rest]


def test_batches_that_a_script_fed_may_be_the_same_or_others():
    for k in range(1, 9):
        for verified in range(k):
            charged = cost([Span("", 0, 1, LOUD, copy >= verified) for copy in range(k)])
            multipliers = sorted(release.noise_multiplier for release in charged.elements())
            for groups in partitions(k, k):
                needed = sorted(0.7 / math.sqrt(group) for group in groups)
                assert all(is_charged <= need for is_charged, need in zip(multipliers, needed, strict=False))
                assert len(needed) <= len(multipliers)


def test_a_step_is_one_release_in_all_copies():
    ledger = again(PrivacyLedger(), 0)
    with pytest.raises(AccountingError, match="no bound covers"):
        again(ledger, 0, replace(LOUD, noise_multiplier=0.5))
    assert ledger.releases == 1


def test_a_run_that_was_taken_up_twice_is_one_run():
    saved = again(PrivacyLedger(run="a"), 0)
    saved.steps = 1
    state = saved.state_dict()
    for run, joined in (("a", 2), ("b", 1)):
        other = PrivacyLedger(run=run)
        other.record(LOUD)
        other.load_state_dict(state)
        expected = cost([Span("", 0, 1, LOUD, False)] * joined)
        assert other._cost == (expected if joined == 2 else expected + expected)
        assert other.releases == 2


def test_a_step_over_the_budget_is_refused_when_it_is_taken_again():
    budget = {"target_epsilon": compute_epsilon(((LOUD, 2),), 1e-5), "target_delta": 1e-5}
    ledger = PrivacyLedger()
    ledger.record(LOUD)
    assert ledger.allows(LOUD, **budget, plan=((LOUD, 2),))
    ledger.steps = 0
    assert not ledger.allows(LOUD, **budget, plan=((LOUD, 2),))
    roomy = {**budget, "target_epsilon": 10.0}
    assert ledger.allows(LOUD, **roomy, plan=((LOUD, 2),))
    assert not ledger.allows(LOUD, **budget, unverified_sampling=True)
