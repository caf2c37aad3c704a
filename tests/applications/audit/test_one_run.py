"""The one-run audit: canaries contribute what they should, or nothing; scores are those of a Gaussian mechanism.

Coins, data and run secrets are fixed, so the tests pass or fail for good; under random ones a sound engine would fail
each with probability FALSE_ALARM at most.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine, QuantileTracking
from dpshard.applications.audit import GradientCanaries, InputCanaries, refuted, toss_coins
from dpshard.errors import ConfigurationError, LogicalBatchError
from tests.applications.audit import faults

FALSE_ALARM = 1e-6
SECRET = bytes(range(32))

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


@pytest.fixture(autouse=True)
def known_secret(monkeypatch):
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: SECRET)


def loss(scores, y):
    return F.cross_entropy(scores, y, reduction="none")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def dataset(n=20):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.arange(n) % 3)


def run(canaries, *, steps=1, expected=None, lr=0.1, before=None, **options):
    """Train with canaries; return the model, its engine, and the last step's gradients."""
    model = canaries.wrap(network())
    data = canaries.among(dataset())
    options = {"batch_size": expected or len(data), "sample_size": len(data), "noise_multiplier": 1.0} | options
    engine = PrivacyEngine(model, steps=steps, clipping_fn=options.pop("clipping_fn", "abadi"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for logical_batch in engine.batches(data, 64):
        optimizer.zero_grad()
        if before is not None:
            before(engine)
        for rows in logical_batch:
            canaries.losses(model, *rows, loss).mean().backward()
        engine.privatize()
        canaries.observe(engine, logical_batch.step)
        optimizer.step()
    engine.detach()
    return engine, {name: p.grad for name, p in model.named_parameters()}


def test_coins_are_fair_and_secret():
    coins = toss_coins(4000, SECRET)
    assert stats.binomtest(int(coins.sum()), 4000).pvalue > FALSE_ALARM
    assert np.array_equal(coins, toss_coins(4000, SECRET))
    assert not np.array_equal(coins, toss_coins(4000, bytes(32)))
    for wrong in (1, 2.5):
        with pytest.raises(ConfigurationError, match=f"canaries={wrong}"):
            toss_coins(wrong, SECRET)


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_a_gradient_canary_contributes_its_whole_norm_or_nothing(style):
    included = np.array([True, False, True, False, False])
    canaries = GradientCanaries(included)
    engine, gradients = run(canaries, noise_multiplier=0, max_grad_norm=0.25, clipping_style=style)
    groups = len(engine.mechanism.clipping_groups)
    released = gradients["probe.weight"][:, 0] * 25
    assert torch.allclose(released, torch.tensor([*included, False]) * 0.25 / groups**0.5)


def test_canaries_do_not_touch_the_model():
    """The release of the model's parameters is that of the data without canaries, up to the public batch size."""
    nobody, all_in = np.zeros(5, bool), np.ones(5, bool)
    for kinds in ((nobody, all_in), (nobody, nobody)):
        released = [run(GradientCanaries(coins), noise_multiplier=0)[1] for coins in kinds]
        for name in released[0]:
            if name != "probe.weight":
                assert torch.equal(released[0][name], released[1][name])
                assert released[0][name].norm() > 0


def test_scores_are_those_of_a_gaussian_mechanism():
    """With every sample in every step, the log likelihood ratio is normal: mean +-mu^2 / 2, variance mu^2."""
    included, sigma, steps = toss_coins(2000, SECRET), 2.0, 5
    canaries = GradientCanaries(included)
    run(canaries, steps=steps, noise_multiplier=sigma)
    mu = steps**0.5 / sigma
    normal = (canaries.scores - np.where(included, 1, -1) * mu**2 / 2) / mu
    assert stats.kstest(normal, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("clipping_fn", ["abadi", "global"])
def test_scores_follow_thresholds_that_move(clipping_fn):
    """The mean of a Gaussian log likelihood ratio is half its variance, whatever the canaries' share of it."""
    included, sigma, steps = toss_coins(2000, SECRET), 2.0, 5
    canaries = GradientCanaries(included)
    tracking = QuantileTracking(0.2, learning_rate=1.0)
    before = canaries.below_threshold if clipping_fn == "global" else None
    options = {"clipping_style": "layer-wise", "adaptive_clipping": tracking, "clipping_fn": clipping_fn}
    engine, _ = run(canaries, steps=steps, noise_multiplier=sigma, before=before, **options)
    assert max(abs(value * 3**0.5 - 1) for value in engine.thresholds.values()) > 0.2
    # mu^2 of the steps: the squared share of the canaries in the sensitivity, over sigma^2.
    spread = float(np.var(canaries.scores[included]))
    assert canaries.scores[included].mean() == pytest.approx(spread / 2, abs=5 * (spread / 1000) ** 0.5)
    assert canaries.scores[~included].mean() == pytest.approx(-spread / 2, abs=5 * (spread / 1000) ** 0.5)
    assert 0.01 < spread < steps / sigma**2


def test_scores_count_the_chance_of_being_drawn():
    """With Poisson samples, e^score is a likelihood ratio, with mean 1 over excluded canaries."""
    included = np.zeros(4000, bool)
    canaries = GradientCanaries(included)
    run(canaries, steps=3, expected=1005, noise_multiplier=1.0)
    ratio = np.exp(canaries.scores)
    assert abs(ratio.mean() - 1) < stats.norm.isf(FALSE_ALARM / 2) * ratio.std() / 4000**0.5
    assert ratio.std() > 0.1


def test_a_sound_run_passes_and_one_with_too_little_noise_does_not(monkeypatch):
    for faulty in (False, True):
        if faulty:
            faults.weaken_noise(monkeypatch, 8)
        canaries = GradientCanaries(toss_coins(1000, SECRET))
        engine, _ = run(canaries, steps=4, expected=510, noise_multiplier=4.0)
        assert refuted(canaries.guesses(), engine) == faulty
        assert (canaries.guesses().epsilon(1e-5, 0.95) > engine.epsilon(1e-5)) == faulty
        assert canaries.guesses().epsilon(1e-5, 0.95) > 0


def test_gradients_without_noise_are_shown_to_nobody():
    engine = PrivacyEngine(network(), batch_size=2, sample_size=20, steps=1, noise_multiplier=1.0)
    for logical_batch in engine.batches(dataset(), 8):
        for x, y in logical_batch:
            loss(engine.model(x), y).mean().backward()
        with pytest.raises(LogicalBatchError, match="privatize"):
            engine.internals.full_gradient("0.weight")
        engine.privatize()
        assert engine.internals.full_gradient("0.weight") is engine.model[0].weight.grad
    engine.detach()


def orthogonal_inputs():
    """Return canaries with nearly orthogonal gradients: each has its own input."""
    return 3 * torch.eye(4)[:, :4], torch.tensor([0, 1, 2, 0])


def test_an_input_canary_is_a_sample_or_nothing():
    x, y = orthogonal_inputs()
    included = np.array([True, False, False, False])
    canaries = InputCanaries(included, x, y, loss)
    _, gradients = run(canaries, noise_multiplier=0, max_grad_norm=0.1)
    model = network()
    own = torch.autograd.grad(loss(model(x[:1]), y[:1]).sum(), list(model.parameters()))
    norm = sum(g.square().sum() for g in own).sqrt()
    for gradient, g in zip(gradients.values(), own, strict=True):
        assert torch.allclose(gradient * 24, 0.1 * g / norm, atol=1e-7)
    # An included canary scores its whole norm; others score its pull along their gradients.
    assert canaries.scores[0] == pytest.approx(1, abs=1e-5)
    assert np.abs(canaries.scores[1:]).max() < 1


def test_scores_of_input_canaries_follow_the_model():
    """With a moving model and Poisson samples, included canaries still score higher."""
    x, y = orthogonal_inputs()
    included = np.array([True, False, False, True])
    canaries = InputCanaries(included, x, y, loss)
    run(canaries, steps=60, expected=12, noise_multiplier=0.1, lr=0.05, max_grad_norm=0.1)
    assert canaries.scores[included].min() > canaries.scores[~included].max()


def test_input_canaries_need_a_coin_each_and_a_model():
    x, y = orthogonal_inputs()
    with pytest.raises(ConfigurationError, match="3 coins for 4"):
        InputCanaries(np.ones(3, bool), x, y, loss)
    with pytest.raises(ConfigurationError, match="wrap"):
        InputCanaries(np.ones(4, bool), x, y, loss).observe(None, 0)
