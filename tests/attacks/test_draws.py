"""Mixing after a branch that a random draw decides, for any place of the draw in its range. Failure mode 12."""

import pytest
import torch
from torch import nn
from torch.distributions import Beta, Gamma

from dpshard import PrivacyEngine
from dpshard.errors import UnsupportedParameterError, VerificationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, D = 8, 6
REFUSED = (VerificationError, UnsupportedParameterError)


def normal():
    return 10 * torch.randn(B, D, generator=torch.Generator().manual_seed(1))


def steps_until_refused(change, n, secret=bytes(range(32))):
    """Return how many of n steps are released before one is refused."""
    torch.manual_seed(0)
    model = Changed(change)
    engine = PrivacyEngine(model, batch_size=B, sample_size=B, steps=100, noise_multiplier=0, max_grad_norm=1.0)
    engine._secret = secret
    for step in range(n):
        try:
            model(normal()).square().mean().backward()
            engine.privatize()
        except REFUSED:
            return step
        model.zero_grad()
    return n


class Changed(nn.Module):
    """A network that changes its inputs at random."""

    def __init__(self, change):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))
        self.change = change

    def forward(self, x):
        return self.net(self.change(x))


def mixed(x):
    return 0.6 * x + 0.4 * x.flip(0)


def one_of_three(x):
    draw = torch.rand(())
    return x if draw < 1 / 3 else mixed(x) if draw < 2 / 3 else -x


def by_integer(x):
    return mixed(x) if torch.randint(10, ()) > 4 else x


def by_beta(x):
    share = Beta(0.2, 0.2).sample()
    return share * x + (1 - share) * x.flip(0) if share < 0.2 else x


def cut_mix(x):
    """Hide a patch in the corner by black borders."""
    x = x * torch.tensor([0, 0, 1, 1, 1, 0])
    start = int(torch.randint(0, D - 1, ()))
    x[:, start : start + 2] = x.flip(0)[:, start : start + 2]
    return x


MIXING = {
    "a coin": lambda x: mixed(x) if torch.randint(0, 2, ()) else x,
    "a coin by keyword": lambda x: mixed(x) if torch.randint(low=0, high=2, size=()) else x,
    "a coin like another": lambda x: mixed(x) if torch.randint_like(x[0, 0], 2) else x,
    "a coin in place": lambda x: mixed(x) if torch.empty((), dtype=torch.long).random_(0, 2) else x,
    "no head of Bernoulli": lambda x: x if torch.bernoulli(torch.tensor(0.5)) else mixed(x),
    "the middle third": one_of_three,
    "a high integer": by_integer,
    "a roll": lambda x: x.roll(int(torch.randint(0, len(x), ())), 0),
    "Beta": by_beta,
    "Gamma": lambda x: mixed(x) if Gamma(1.0, 1.0).sample() > 2 else x,
    "CutMix": cut_mix,
}


@pytest.mark.parametrize("mixing", MIXING)
def test_mixing_behind_a_draw_is_refused_at_once(mixing):
    assert steps_until_refused(MIXING[mixing], 1) == 0


def test_a_narrow_branch_is_met_by_later_verifications():
    """Each verification draws anew, from the run's secret: 8 of them miss a share of 0.25 one time in ten."""

    def narrow(x):
        return mixed(x) if 0.6 < torch.rand(()) < 0.85 else x

    found = [steps_until_refused(narrow, 40, bytes([i]) * 32) for i in range(6)]
    assert sum(step < 40 for step in found) >= 3
    assert len(set(found)) > 1


HONEST = {
    "one of three": lambda x: (x, -x, 2 * x)[int(3 * torch.rand(()))],
    "an integer of features": lambda x: x.roll(int(torch.randint(0, D, ())), 1),
    "steps of diffusion": lambda x: x / (1 + torch.randint(0, 1000, (len(x), 1))),
    "integers like others": lambda x: x + torch.randint_like(x, 1, 5),
    "Gamma": lambda x: x * Gamma(2.0, 1.0).sample((len(x), 1)),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
    "Bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "Gumbel": lambda x: x + torch.nn.functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("honest", HONEST)
def test_an_honest_draw_trains(honest):
    assert steps_until_refused(HONEST[honest], 9) == 9
