"""What forward leaves for the loss is the sample's own: masks, labels, terms in attributes, and gradients on their way.

PITFALLS row 12.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.attacks.oracle import ALLOWED, influence, is_refused


def dataset(scale=10.0):
    x = scale * torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    x[5] *= 30
    return TensorDataset(x, torch.arange(8) % 2)


def loop_of(loss):
    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, micro_batch_size=8, pad=False):
            for x, y in logical_batch:
                loss(model, x, y).backward()
            optimizer.step()

    return loop


class Outputs(nn.Module):
    """A small network whose forward returns what `of` makes of itself, inputs and logits."""

    def __init__(self, of):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.of = of

    def forward(self, x):
        return self.of(self, x, self.net(x))


# --- masks and labels that forward returns ----------------------------------------------------------------------------


def on_kept(model, x, y):
    logits, kept = model(x)
    return (F.cross_entropy(logits, y, reduction="none") * kept).mean()


def on_own_labels(model, x, _):
    return F.cross_entropy(*model(x))


CHOICES = {
    "a mask of hard samples": (lambda _, x, o: (o, x.norm(dim=1) >= x.norm(dim=1).mean()), on_kept),
    "labels after centring": (lambda _, x, o: (o, (o.detach() - o.detach().mean(0)).argmax(1)), on_own_labels),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_that_depends_on_other_samples_is_refused(choice):
    of, loss = CHOICES[choice]
    assert "when the inputs of other samples do" in (is_refused(lambda: Outputs(of), loop_of(loss), dataset()) or "")


HONEST_CHOICES = {
    "a mask by a constant": (lambda _, x, o: (o, x.norm(dim=1) >= 5), on_kept),
    "own labels": (lambda _, x, o: (o, o.detach().argmax(1)), on_own_labels),
    "ids and a count": (lambda _, x, o: (o, x.argmax(1), (x > 0).sum()), lambda m, x, y: F.cross_entropy(m(x)[0], y)),
}


@pytest.mark.parametrize("choice", HONEST_CHOICES)
def test_a_choice_by_the_sample_alone_is_exact(choice):
    of, loss = HONEST_CHOICES[choice]
    assert influence(lambda: Outputs(of), loop_of(loss), dataset(), left_out=[0]) <= ALLOWED
