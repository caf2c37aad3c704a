"""Scale-then-privatise, against plain loops over samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.recipes import ScaledAdam, scale_parameters, unscale_parameters
from tests.oracle import per_sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")

N = 12
X = torch.randint(0, 7, (N, 3), generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "floor": 1e-2, "weight_decay": 0.1}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(7, 5), nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(self.embedding(x))))).mean(1)


def scaled(**options):
    model = Network()
    scale_parameters(model)
    settings = {"batch_size": N, "sample_size": N, "steps": 4, "noise_multiplier": 0.0, "max_grad_norm": 0.5}
    engine = PrivacyEngine(model, clipping_fn="abadi", **{**settings, **options})
    return model, engine, ScaledAdam(model, **ADAM)


def train(model, engine, optimizer, steps=None):
    for logical_batch in engine.batches(TensorDataset(X, Y), 5, steps=steps):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_run_is_that_of_plain_loops():
    """Gradients times s, clipped as a whole, averaged; divided by s; Adam; the next s."""
    model, engine, optimizer = scaled()
    train(model, engine, optimizer)
    engine.detach()
    unscale_parameters(model)
    theirs = Network()
    s = {name: torch.ones_like(p) for name, p in theirs.named_parameters()}
    m, v = ({name: torch.zeros_like(p) for name, p in s.items()} for _ in range(2))
    for t in range(1, 5):
        total = {name: torch.zeros_like(p) for name, p in s.items()}
        clipped = 0
        for g in per_sample_gradients(theirs, (X, Y), F.cross_entropy):
            length = torch.cat([(s[name] * g[name]).flatten() for name in s]).norm()
            clipped += bool(length > 0.5)
            for name in s:
                total[name] += s[name] * g[name] * min(1, 0.5 / length) / N
        assert clipped > 0
        fresh = {}
        for name, p in theirs.named_parameters():
            g = total[name] / s[name]
            m[name], v[name] = 0.8 * m[name] + 0.2 * g, 0.9 * v[name] + 0.1 * g**2
            root = (v[name] / (1 - 0.9**t)).sqrt()
            p.data = p.data - 0.05 * (m[name] / (1 - 0.8**t) / (root + 1e-6) + 0.1 * p.data)
            fresh[name] = 1 / (root + 1e-2)
        rms = torch.cat([x.flatten() for x in fresh.values()]).square().mean().sqrt()
        s = {name: x / rms for name, x in fresh.items()}
    for name, p in theirs.named_parameters():
        assert torch.allclose(model.get_parameter(name), p, rtol=0, atol=1e-12), name


def test_the_noise_of_a_weight_is_in_proportion_to_one_over_its_scale():
    """The private gradient of u has the noise of the engine; that of w = s u is divided by s."""
    model, engine, optimizer = scaled(noise_multiplier=1.0)
    train(model, engine, optimizer, steps=1)
    scale = model.up.parametrizations.weight[0].scale.clone()
    assert scale.max() > 2 * scale.min()
    for logical_batch in engine.batches(TensorDataset(X, Y), 5, steps=1):
        for x, y in logical_batch:
            (F.cross_entropy(model(x), y) * 0).backward()
        engine.privatize()
        noise = model.up.parametrizations.weight.original.grad.clone()
        moment = optimizer.state[model.up.parametrizations.weight.original]["exp_avg"].clone()
        optimizer.step()
    after = optimizer.state[model.up.parametrizations.weight.original]["exp_avg"]
    assert torch.allclose((after - 0.8 * moment) / 0.2, noise / scale)


def test_scaling_changes_no_output_and_is_undone():
    model, plain = Network(), Network()
    scale_parameters(model)
    assert torch.equal(model(X), plain(X))
    for module in model.modules():
        if hasattr(module, "scale"):
            module.scale.mul_(2.0)
    unscale_parameters(model)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert torch.equal(model.up.weight, 2 * plain.up.weight)


def test_a_checkpoint_holds_the_scales(tmp_path):
    whole, resumed = scaled(noise_multiplier=1.0), scaled(noise_multiplier=1.0)
    checkpoints = [Checkpointer(tmp_path, engine, optimizer) for _, engine, optimizer in (whole, resumed)]
    train(*whole, steps=2)
    checkpoints[0].save()
    train(*whole, steps=2)
    assert checkpoints[1].load()
    train(*resumed, steps=2)
    ours, theirs = whole[0].state_dict(), resumed[0].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(name.endswith("scale") for name in ours)


def test_what_cannot_be_scaled_is_refused():
    tied = Network()
    tied.down = copy.deepcopy(tied.up)
    tied.down.weight = tied.up.weight
    with pytest.raises(ConfigurationError, match=r"up\.weight and down\.weight are one parameter"):
        scale_parameters(tied)
    with pytest.raises(ConfigurationError, match="Call scale_parameters"):
        ScaledAdam(Network())
    scaled = Network()
    scale_parameters(scaled)
    with pytest.raises(ConfigurationError, match="scaled already"):
        scale_parameters(scaled)
    with pytest.raises(ConfigurationError, match="takes the model"):
        ScaledAdam(scaled.parameters())
