"""Verification has no side effects, and takes no more memory than a step."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpshard.errors import VerificationError
from tests.verification.models import (
    MIXERS,
    B,
    Between,
    D,
    T,
    engine_on,
    normal,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]


def test_no_hook_stays_when_verification_fails():
    """A parameter that forward freezes cannot be watched."""

    class Freezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            if len(x) == 1:
                self.second.requires_grad_(False)
            return self.second(self.first(x))

    model = Freezes()
    engine = engine_on(model)
    before = [len(p._backward_hooks) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="require gradient"):
        engine.verify(normal(3, D))
    assert [len(p._backward_hooks) for p in model.parameters()] == before


def test_verification_takes_no_more_memory_than_a_step():
    """Its peak would otherwise be whole gradients of three samples, with copies in float64."""
    weights = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    engine_on(weights)
    with LiveBytes() as live:
        weights(normal(B, 256))
    assert live.peak < 1.5 * sum(p.nbytes for p in weights.parameters())


def test_verification_holds_the_activations_of_one_forward_at_a_time():
    model = nn.Sequential(nn.Linear(4, 4), *(Spread() for _ in range(8)))
    engine_on(model)
    x = normal(3, 4)
    with LiveBytes() as first:
        model(x)
    with LiveBytes() as second:
        model(x).mean().backward()
    assert first.peak < 1.1 * second.peak


class Spread(nn.Module):
    """Many activations, and no parameters."""

    def forward(self, x):
        return x[..., None].expand(-1, -1, 2**16).tanh().exp().mean(2)


class LiveBytes(TorchDispatchMode):
    """Counts the memory of live tensors that functions have returned."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
                self.peak = max(self.peak, self.now)
        return result

    def free(self, nbytes):
        self.now -= nbytes


class Recording(nn.Module):
    """Has buffers of all kinds, and draws random numbers from all sources."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D).eval()
        self.register_buffer("added", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(()), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("spectrum", torch.randn(D, D))

    def forward(self, x):
        self.added += 1
        self.assigned = self.assigned + len(x)
        random.random(), np.random.rand()  # noqa: NPY002
        return F.dropout(self.norm(self.linear(x)), 0.5) * (torch.randn(()) * 0 + 1)


def state_of(model):
    # A tensor's object and version also reveal a change that was undone.
    buffers = {
        name: None if b is None else (id(b), b.clone()) for m in model.modules() for name, b in m._buffers.items()
    }
    gradients = {
        name: None if p.grad is None else (id(p.grad), p.grad._version) for name, p in model.named_parameters()
    }
    parameters = {name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()}
    generators = torch.get_rng_state().tolist(), random.getstate(), [str(x) for x in np.random.get_state()]  # noqa: NPY002
    return buffers, gradients, parameters, generators, model.training


def assert_same(before, after):
    for name, buffer in before[0].items():
        if buffer is None:
            assert after[0][name] is None
        else:
            assert buffer[0] == after[0][name][0], name
            assert torch.equal(buffer[1], after[0][name][1]), name
    assert before[1:] == after[1:]


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("collecting", [True, False])
def test_verification_changes_nothing(collecting, mode):
    model = Recording()
    values = copy.deepcopy(model.state_dict())
    engine = engine_on(model, clipping_mode=mode)
    x = normal(B, D)
    if collecting:
        model(x).sum(1).mean().backward()
    before, ledger = state_of(model), engine.state_dict()
    engine.verify(x)
    engine.verify(x, loss_fn=lambda y, t: ((y - t) ** 2).sum(1).mean(), targets=normal(B, D))
    with pytest.raises(VerificationError):
        engine.verify(x, loss_fn=lambda y: y.mean(0).square().sum())
    assert_same(before, state_of(model))
    assert x.grad is None
    assert engine.state_dict() == ledger
    if not collecting:
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    if collecting:
        engine.privatize()
        assert engine.step == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_first_forward_is_the_forward_of_the_plain_model(verify):
    """Output, buffers and random numbers are those of an untouched model."""
    plain = Recording()
    model = copy.deepcopy(plain)
    engine_on(model, verify=verify)
    drawn = []
    for m in (plain, model):
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        torch.manual_seed(7)
        outputs = [m(normal(B, D)) for _ in range(2)]
        drawn.append([*outputs, m.added, m.assigned, torch.rand(2), random.random(), np.random.rand()])  # noqa: NPY002
    for expected, found in zip(*drawn, strict=True):
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))


def test_verification_may_be_turned_off():
    forwards = []
    model = Between(lambda h: forwards.append(h) or MIXERS["mean over samples"](h))
    engine_on(model, verify=False)
    model(normal(B, T, D)).sum().backward()
    assert len(forwards) == 1
