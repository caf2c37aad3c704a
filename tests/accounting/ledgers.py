"""A release, a budget, ledgers and runs for tests."""

import math

from scipy import special

from dpshard.accounting import (
    PrivacyLedger,
    Release,
    SampledMechanism,
    calibrate,
    compute_bound,
    steps_for_epsilon,
)
from dpshard.config import BatchSchedule

RELEASE = Release(1.0, 0.01, 10_000)
BUDGET = {"target_epsilon": 1.0, "target_delta": 1e-5}


def ledger_of(*releases, accountant="pld"):
    ledger = PrivacyLedger(accountant)
    for release in releases:
        ledger.record(release)
    return ledger


def run_of(phases, *, sample_size, **facts):
    schedule = BatchSchedule.parse(phases, sample_size=sample_size)
    return SampledMechanism(schedule=schedule, sample_size=sample_size, **facts)


def run_bound(phases, *, target_delta, accountant="pld", search=None, **facts):
    return compute_bound(run_of(phases, **facts).releases(), target_delta, accountant, search)


def run_epsilon(phases, **facts):
    return run_bound(phases, **facts).epsilon


def run_sigma(phases, *, target_epsilon, target_delta, accountant="pld", search=None, **facts):
    budget = {"target_epsilon": target_epsilon, "target_delta": target_delta}
    return calibrate(run_of(phases, **facts), **budget, accountant=accountant, search=search).noise_multiplier


def run_steps(batch_size, *, target_epsilon, target_delta, accountant="pld", search=None, **facts):
    budget = {"target_epsilon": target_epsilon, "target_delta": target_delta}
    release = run_of([(batch_size, 1)], **facts).release(0)
    return steps_for_epsilon(release, **budget, accountant=accountant, search=search)


def delta_of_gaussian(mu, epsilon):
    """Return the exact delta of the Gaussian mechanism; Balle and Wang 2018, arXiv:1805.06530, Theorem 8."""
    return float(special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)))
