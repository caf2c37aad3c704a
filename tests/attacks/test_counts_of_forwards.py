"""Models that count their forwards: without one sample, other samples may meet other counts.

A logical batch has as many micro-batches as its samples need. So the count depends on who was drawn, and a release
changes by more than R if a sample is removed. It does not if the sample's gradient becomes zero.

Failure mode: 12 (samples that see each other).
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from tests.attacks.oracle import ALLOWED, influence

N, D, P, B = 9, 3, 2, 4


class Counting(nn.Module):
    """Changes its course, or nothing, with each forward."""

    def __init__(self, course):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(D, 4), nn.Linear(4, 4), nn.Linear(4, P)
        self.course, self.calls = course, 0
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        self.calls += 1
        return self.last(torch.tanh(self.course(self, self.first(x))))


def alternates(m, h):
    return m.other(h) if m.calls % 2 else h


def ramps(m, h):
    return h + m.other(h) * min(1.0, m.calls / 10)


def counts(m, h):
    return h + m.other(h)


def draws(m, h):
    return h + m.other(h) * torch.rand(len(h), 1, generator=m.generator)


def spectral(course=counts):
    model = Counting(course)
    torch.nn.utils.spectral_norm(model.other)
    return model


def dataset():
    x = 10 * torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(N) % P)


def loop(micro):
    def run(model, engine, optimizer, data):
        for logical_batch in engine.batches(data, micro_batch_size=micro):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def warned(build, micro, **settings):
    """Return True if a step on all samples warns of a count."""
    torch.manual_seed(0)
    model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = PrivacyEngine(
            model, batch_size=N, sample_size=N, max_grad_norm=1.0, steps=2, noise_multiplier=1.0, **settings
        )
        try:
            loop(micro)(model, engine, torch.optim.SGD(model.parameters(), lr=0.1), dataset())
        finally:
            engine.detach()
    return sum("as by a count of forwards" in str(warning.message) for warning in caught) == 1


COUNTING = {"another layer": lambda: Counting(alternates), "a ramp": lambda: Counting(ramps), "power steps": spectral}


@pytest.mark.parametrize("build", COUNTING.values(), ids=COUNTING)
def test_a_count_that_others_move_is_told(build):
    assert warned(build, B)


def test_what_one_sample_then_counts():
    assert influence(COUNTING["another layer"], loop(B), dataset(), left_out=[0]) > 1.5


@pytest.mark.parametrize("course", [counts, draws])
def test_a_count_that_decides_nothing_and_random_numbers_are_not_told(course):
    assert not warned(lambda: Counting(course), B)


def test_one_micro_batch_per_step_is_exact():
    build = COUNTING["another layer"]
    assert not warned(build, N)
    assert influence(build, loop(N), dataset(), left_out=[0, N - 1]) <= ALLOWED


@pytest.mark.parametrize("settings", [{"max_batch_size": N}, {"sampling": "fixed-order"}], ids=["cap", "order"])
def test_where_a_neighbour_keeps_its_place_nothing_is_told(settings):
    assert not warned(COUNTING["another layer"], B, **settings)
