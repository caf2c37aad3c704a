"""The audit of runs in a fixed order refutes planted faults, and passes the sound engine (rows 1, 2, 20).

Under a random secret a sound engine would be refuted with probability 1e-6 at most; secrets are fixed here. Faults that
weaken no bound, such as a dropped weight of the noise, show in the audit of releases (test_releases.py).
"""

import itertools

import numpy as np
import pytest
import torch

from dpshard import BandedInverse, BandMF
from dpshard.accounting import sampling_schemes
from dpshard.applications.audit import audit_runs
from dpshard.noise.correlation import sensitivities
from dpshard.noise.keyed import KeyedGaussian
from dpshard.sampling import FixedOrderSampler
from tests.applications.audit.test_steps import classifier

SIGMA = 0.75


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: next(numbers).to_bytes(32, "little"))


def audit(samples=2, steps=4, trials=100):
    """One sample a step: the canary is in steps / samples of them."""
    model, x, y, loss = classifier()
    options = {"noise_correlation": BandedInverse(bands=3), "noise_multiplier": SIGMA, "trials": trials}
    rows = torch.arange(samples) % len(x)
    return audit_runs(model, x[rows], y[rows], loss, steps=steps, batch_size=1, **options)


@pytest.mark.exhaustive
def test_a_sound_run_is_consistent_and_the_audit_proves_most_of_it():
    found = audit()
    assert found.accounted_mu == 1 / SIGMA
    assert found.refuted_at() is None
    assert 0.6 < found.trials.mu(0.95) < 1.6


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "balls-in-bins"},
        {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=2)},
        pytest.param(
            {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=2, buffers=True)},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["bins", "groups", "buffers"],
)
@pytest.mark.exhaustive
def test_runs_of_random_batches_are_audited(options):
    model, x, y, loss = classifier()
    found = audit_runs(model, x, y, loss, steps=4, batch_size=1, trials=50, noise_multiplier=0.2, **options)
    assert found.refuted_at() is None
    assert 0.5 < found.lower_bound(0.1, 0.95) < found.accounted(0.1)


def participate_at_every_step(monkeypatch):
    monkeypatch.setattr(FixedOrderSampler, "draw", lambda self, step: np.array([5]))


def count_a_single_column(monkeypatch):
    monkeypatch.setattr(
        sampling_schemes,
        "sensitivities",
        lambda correlation, steps, separation: sensitivities(correlation, steps, steps),
    )


def weaken_the_vectors(monkeypatch):
    release_ = KeyedGaussian.release_
    monkeypatch.setattr(
        KeyedGaussian,
        "release_",
        lambda self, shards, *, step, std, divisor=1.0: release_(self, shards, step=step, std=std / 3, divisor=divisor),
    )


@pytest.mark.parametrize(
    ("fault", "run"),
    [
        (participate_at_every_step, {"samples": 6, "steps": 6, "trials": 80}),
        (count_a_single_column, {"samples": 1, "steps": 8, "trials": 80}),
        (weaken_the_vectors, {}),
    ],
)
@pytest.mark.exhaustive
def test_a_fault_is_refuted(fault, run, monkeypatch):
    """The first two multiply mu by 4.7 and 4.8: under a random secret, more than 99% of audits refute them."""
    fault(monkeypatch)
    assert audit(**run).refuted_at() is not None
