"""Losses that are switched off, clamped or repaired for a whole micro-batch: one sample decided about all others.

In the first steps, and in micro-batches of few rows, nothing tells them from losses that leave out single samples:
one sample counted 3.95 times there, with eight rows. See docs/privacy-model.md.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import LogicalBatchError
from dpshard.interception import Doubts
from tests.grids import each

N, D, B, STEPS, ODD = 32, 3, 8, 4, 9


def linear():
    return nn.Linear(D, 2)


def data(odd=None):
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    if odd is not None:
        x[ODD] = odd
    return TensorDataset(x, torch.arange(N) % 2)


def train(body, dataset, build=linear, micro=B, steps=STEPS, q=1.0, **settings):
    """Train with `body(model, x, y, step)` as the loss."""
    torch.manual_seed(0)
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = int(q * N)
        engine = PrivacyEngine(model, batch_size=size, sample_size=N, steps=steps, noise_multiplier=0.0, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        for logical_batch in engine.batches(dataset, micro):
            for x, y in logical_batch:
                body(model, x, y, logical_batch.step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.step
    finally:
        engine.detach()


def switched(loss):
    return 0 * loss if not loss.item() < 20 else loss


REPAIRS = {
    "0 * loss": switched,
    "clamp": lambda loss: loss.clamp(max=20),
    "nan_to_num": torch.nan_to_num,
    "where": lambda loss: torch.where(loss.isfinite() & (loss < 20), loss, 0),
}


class WithLoss(nn.Module):
    def __init__(self, repair):
        super().__init__()
        self.net, self.repair = linear(), repair

    def forward(self, x, y):
        return self.repair(F.cross_entropy(self.net(x), y))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(("repair", "where"), each(REPAIRS, ["loop", "model"]))
def test_a_loss_that_is_repaired_for_a_whole_micro_batch_is_refused(repair, where):
    of = REPAIRS[repair]
    odd = data(torch.nan if repair == "nan_to_num" else 1e5)
    odd.tensors[1][ODD] = 1 if repair == "nan_to_num" else int(torch.manual_seed(0) and linear()(odd[ODD][0]).argmin())
    build, body = linear, lambda model, x, y, _: of(cross_entropy(model, x, y))
    if where == "model":
        build, body = lambda: WithLoss(of), lambda model, x, y, _: model(x, y)
    with pytest.raises(LogicalBatchError, match="row by row, before the mean"):
        train(body, odd, build, verify=False)


def test_flags_of_an_accelerator_are_read_at_the_release(monkeypatch):
    begin = Doubts.__init__
    monkeypatch.setattr(Doubts, "__init__", lambda self, *, at_once: begin(self, at_once=False))
    first = data()[0][0][0]

    def loss(model, x, y, _):
        return (0 if x[0, 0] == first else 1) * cross_entropy(model, x, y)

    with pytest.raises(LogicalBatchError, match="row by row"):
        train(loss, data())


def off(rows):
    """Return a loss without gradients for these samples, in any micro-batch."""

    def loss(model, x, y, step):
        weight = torch.tensor([float(not rows(float(row[0]), step)) for row in x])
        return (weight * F.cross_entropy(model(x), y, reduction="none")).mean()

    return loss


def hinge(model, x, y, _):
    return F.multi_margin_loss(model(100 * x), y, margin=0.1)


HONEST = {
    "hinge": hinge,
    "half of the samples": off(lambda value, _: value > 0),
    "all samples of some steps": off(lambda _, step: step % 2),
    "all but one": off(lambda value, _: value < 1.8),
    "the first micro-batch by itself, from the beginning": off(
        lambda value, _: any(value == float(v) for v in data()[:9][0][:, 0])
    ),
}


@pytest.mark.parametrize(("honest", "micro"), each(HONEST, [1, 2, B]))
def test_samples_without_a_gradient_train(honest, micro):
    assert train(HONEST[honest], data(), micro=micro, steps=12, verify=False) == 12


@pytest.mark.parametrize("micro", [1, 2])
def test_small_micro_batches_without_a_gradient_train(micro):
    """A pair of samples has no gradient, by chance, now and then."""
    first = [float(v) for v in data()[:micro][0][:, 0]]
    assert train(off(lambda value, step: step and value in first), data(), micro=micro, steps=6) == 6


def test_blank_samples_train():
    x, y = data().tensors
    dataset = TensorDataset(x * (torch.arange(N) >= 10)[:, None], y)
    assert (
        train(lambda model, x, y, _: cross_entropy(model, x, y), dataset, lambda: nn.Linear(D, 2, bias=False), steps=6)
        == 6
    )


def test_random_honest_silence_trains():
    """Poisson samples of randomly ordered data: at most 1e-8 a step, by the bound in the module's note."""
    loss = off(lambda value, _: value > -0.5)
    assert train(loss, data(), micro=4, steps=40, q=0.5) == 40
