"""What forward leaves for the loss is the sample's own: masks, labels, terms in attributes, and gradients on their way.

Failure mode 12.
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


# --- gradients on their way back --------------------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    """Clips a gradient of activations by its norm."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * min(1.0, ctx.limit / float(g.norm())), None


def hooked(_, x, o):
    if o.requires_grad:
        o.register_hook(lambda g: g * min(1.0, 50.0 / float(g.norm())))
    return o


def small(scale=0.1):
    return TensorDataset(scale * torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2)


def outside(model, x, y):
    return 500 * F.cross_entropy(model(x), y, reduction="sum")


BACKWARD = {"a hook": hooked, "a function": lambda _, x, o: Clipped.apply(o, 50.0)}


@pytest.mark.parametrize("of", BACKWARD)
def test_gradients_of_activations_that_the_batch_clips_are_refused(of):
    """The limit is above the gradients of verification, and below those of training."""
    message = is_refused(lambda: Outputs(BACKWARD[of]), loop_of(outside), small(), loss_reduction="sum")
    assert "gradients of 3 samples together" in (message or "")


def test_gradients_of_activations_that_rows_clip_are_exact():
    def of(_, x, o):
        if o.requires_grad:
            o.register_hook(lambda g: g * (50.0 / g.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1))
        return o

    assert influence(lambda: Outputs(of), loop_of(outside), small(), left_out=[0], loss_reduction="sum") <= ALLOWED


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e17])
@pytest.mark.parametrize("bias", [True, False])
def test_blank_and_huge_samples_train(size, bias):
    def build():
        return nn.Sequential(nn.Conv1d(1, 4, 2, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2, bias=bias))

    x = size * torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.arange(8) % 2)
    own = loop_of(lambda model, x, y: F.cross_entropy(model(x), y))
    assert influence(build, own, data, left_out=[0]) <= ALLOWED


@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_hook_of_the_user_is_named(early):
    def build():
        model = nn.Linear(3, 2)
        if early:
            model.weight.register_hook(lambda g: g.clamp(-1, 1))
        return model

    def loop(model, engine, optimizer, dataset):
        if not early:
            model.weight.register_hook(lambda g: g.clamp(-1, 1))
        loop_of(lambda model, x, y: F.cross_entropy(model(x), y))(model, engine, optimizer, dataset)

    assert "gradient hook that is not dpshard's" in (is_refused(build, loop, dataset()) or "")


# --- terms that forward leaves for the loop ---------------------------------------------------------------------------


class Aux:
    """What some forwards return beside logits."""

    def __init__(self, balance):
        self.balance = balance


class Experts(nn.Module):
    """A mixture of experts, whose balance is left by `leave(module, gates [B, E])`."""

    def __init__(self, leave):
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 4), nn.Linear(3, 8)
        self.logs = {}
        self.leave = leave

    def forward(self, x):
        gates = self.gate(x).softmax(1)
        beside = self.leave(self, gates)
        logits = (self.experts(x).view(-1, 4, 2) * gates[..., None]).sum(1)
        return logits if beside is None else (logits, beside)


def balance(gates):
    return 4 * (gates.mean(0) ** 2).sum()


def logits_of(output):
    return output[0] if isinstance(output, tuple) else output


LEFT = {
    "an attribute": (lambda m, g: setattr(m, "l_aux", balance(g)), lambda m, _: m.l_aux),
    "a dict": (lambda m, g: m.logs.update(balance=balance(g)), lambda m, _: m.logs["balance"]),
    "an object": (lambda _, g: Aux(balance(g)), lambda _, o: o[1].balance),
    "features": (lambda m, g: setattr(m, "features", g - g.mean(0)), lambda m, _: m.features.square().mean()),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_balance_that_forward_leaves_for_the_loop_is_refused(left):
    leave, term = LEFT[left]

    def loss(model, x, y):
        output = model(x)
        return F.cross_entropy(logits_of(output), y) + term(model, output)

    assert is_refused(lambda: Experts(leave), loop_of(loss), small(10.0)) is not None


def features(m, g):
    m.features, m.own = g, g.square().sum(1).mean()


HONEST_LEFT = {
    "features": (features, lambda m, _: m.own + m.features.square().sum(1).mean()),
    "a detached balance": (lambda m, g: setattr(m, "l_aux", balance(g).detach()), lambda *_: 0.0),
    "a penalty of own rows": (lambda _, g: Aux(g.square().sum(1).mean()), lambda _, o: o[1].balance),
    "a norm of weights": (lambda m, g: setattr(m, "size", m.experts.weight.detach().norm() * 1.0), lambda *_: 0.0),
}


@pytest.mark.parametrize("left", HONEST_LEFT)
def test_terms_of_single_samples_that_forward_leaves_are_exact(left):
    leave, term = HONEST_LEFT[left]

    def loss(model, x, y):
        output = model(x)
        return F.cross_entropy(logits_of(output), y) + term(model, output)

    assert influence(lambda: Experts(leave), loop_of(loss), small(10.0), left_out=[0]) <= ALLOWED


def test_spectral_normalisation_passes():
    def build():
        return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))

    own = loop_of(lambda model, x, y: F.cross_entropy(model(x), y))
    assert is_refused(build, own, small(10.0)) is None
