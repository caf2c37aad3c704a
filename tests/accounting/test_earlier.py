"""Releases before a run: epsilon covers them from the start, calibration leaves room for them, resumes keep them."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.accounting import Release, compute_epsilon
from dpshard.errors import CheckpointError, ConfigurationError
from tests.accounting.ledgers import delta_of_gaussian

N, DELTA = 20, 1e-3
EARLIER = ((Release(4.0, 1.0, N), 1),)


def engine_of(earlier=EARLIER, **settings):
    facts = {"batch_size": N, "sample_size": N, "steps": 4, "target_delta": DELTA, "target_epsilon": 2.0}
    return PrivacyEngine(nn.Linear(2, 1), **(facts | settings), earlier=earlier)


def take(engine, steps):
    optimizer = torch.optim.SGD(engine.model.parameters(), 0.1)
    for logical_batch in engine.batches(TensorDataset(torch.ones(N, 2)), N, steps=steps):
        for (x,) in logical_batch:
            engine.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_all_gaussians_together(accountant):
    engine = engine_of(accountant=accountant)
    assert engine.epsilon() == compute_epsilon(EARLIER, DELTA, accountant)
    assert engine.epsilon() > 0
    take(engine, 4)
    # All samples are in every batch, so everything is one Gaussian mechanism.
    mu = math.sqrt(4 / engine.noise_multiplier**2 + 1 / 4.0**2)
    assert delta_of_gaussian(mu, engine.epsilon()) <= DELTA
    if accountant == "pld":
        assert delta_of_gaussian(mu, engine.epsilon()) == pytest.approx(DELTA, rel=0.02)
        assert engine.epsilon() == pytest.approx(2.0, rel=1e-3)
    assert engine.epsilon() <= 2.0
    assert "4 releases under Poisson sampling, 1 releases about all samples before them" in engine.statement()


def test_they_cost_noise():
    assert engine_of().noise_multiplier > engine_of(()).noise_multiplier


def test_a_resumed_run_keeps_them_and_another_run_is_refused():
    engine = engine_of()
    take(engine, 2)
    state, spent = engine.state_dict(), engine.epsilon()
    resumed = engine_of()
    resumed.load_state_dict(state)
    assert resumed.epsilon() == spent
    again = engine_of()
    take(again, 1)
    again.load_state_dict(state)  # a further release of this process, and the earlier ones once
    assert spent < again.epsilon()
    other = engine_of((), noise_multiplier=engine.noise_multiplier, target_epsilon=None)
    with pytest.raises(CheckpointError, match="earlier"):
        other.load_state_dict(state)


def test_a_budget_that_they_spend_leaves_no_step():
    engine = engine_of(((Release(0.2, 1.0, N), 1),), target_epsilon=None, noise_multiplier=1.0)
    assert engine.epsilon() > 2
    with pytest.raises(Exception, match="No noise multiplier"):
        engine_of(((Release(0.2, 1.0, N), 1),))


@pytest.mark.parametrize(
    "earlier", [(Release(4.0, 1.0, N),), ((Release(4.0, 1.0, N), 0),), ((Release(4.0, 1.0, N + 1), 1),)]
)
def test_what_is_no_release_about_these_samples_is_refused(earlier):
    with pytest.raises((ConfigurationError, TypeError), match=r"earlier|unpack"):
        engine_of(earlier)
