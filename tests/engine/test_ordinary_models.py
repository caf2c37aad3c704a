"""An engine does not change other engines, evaluation, copies, states, or the model after detach()."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import EngineInUseError, UnsupportedParameterError
from tests.engine.script import UNWARNED, D, P, backward, data, engine_on, gradients, mlp, values
from tests.oracle import clipped_mean, per_sample_gradients, relative_error

pytestmark = UNWARNED


def test_several_engines_live_side_by_side():
    models = [mlp(seed) for seed in range(2)]
    engines = [engine_on(model, noise_multiplier=1.0, max_grad_norm=1.0 + i) for i, model in enumerate(models)]
    both = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1.0)
    for model in models:
        backward(model)
    both.step()
    assert [engine.step for engine in engines] == [1, 1]
    noise = [values(model) for model in models]
    assert not torch.equal(*noise)
    both.zero_grad()
    backward(models[1])
    torch.optim.SGD(models[1].parameters(), lr=1.0).step()
    assert [engine.step for engine in engines] == [1, 2]


def test_one_private_model_may_feed_another():
    encoder, decoder = nn.Linear(D, D, dtype=torch.float64), nn.Linear(D, P, dtype=torch.float64)
    x, y = data(6)
    whole = nn.Sequential(encoder, decoder)
    per_sample = per_sample_gradients(whole, (x, y), F.cross_entropy)
    expected = clipped_mean(
        per_sample, max_grad_norm=2**0.5, batch_size=6, groups=[["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    )
    engines = [engine_on(encoder), engine_on(decoder)]
    F.cross_entropy(decoder(encoder(x)), y).backward()
    for engine in engines:
        engine.privatize()
    assert relative_error(gradients(whole), expected) < 1e-12


def test_a_second_engine_on_a_model_or_a_shared_part_is_refused():
    model = mlp()
    first = engine_on(model)
    for other in (model, nn.Sequential(model, nn.Tanh()), model[0]):
        with pytest.raises(EngineInUseError, match=r"weight already belongs.*detach"):
            engine_on(other)
    first.detach()
    engine_on(model).detach()


def test_detach_gives_an_ordinary_model_back():
    model, twin = mlp(), mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    backward(model)
    engine.detach()
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        backward(m)
        (m[0].weight.square().sum()).backward()
        optimizer.step()
    assert torch.equal(values(model), values(twin))
    assert engine.step == 0


def test_detach_keeps_private_gradients_and_own_forwards():
    model = mlp()
    model[0].forward = own = lambda x: F.linear(x, model[0].weight, model[0].bias)
    engine = engine_on(model, noise_multiplier=1.0)
    backward(model)
    engine.privatize()
    kept = gradients(model)
    engine.detach()
    assert relative_error(gradients(model), kept) == 0
    assert model[0].forward is own


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_is_ordinary(how):
    model, twin, (x, y) = mlp(), mlp(), data(6)
    engine = engine_on(model)
    if how == "eval":
        model.eval()
        output = model(x)
        with pytest.raises(UnsupportedParameterError, match=r"model\.train\(\)"):
            F.cross_entropy(output, y).backward()
    else:
        with getattr(torch, how)():
            output = model(x)
    assert torch.equal(output, twin(x))
    assert not engine._clipper.tokens
    assert not engine._interception.layouts.found
    model.train()
    model.zero_grad()
    backward(model)
    engine.privatize()
    assert engine.step == 1


def test_a_copy_is_an_ordinary_model():
    model, (x, y) = mlp(), data(6)
    engine = engine_on(model, noise_multiplier=1.0)
    backward(model)
    model.zero_grad()
    twin = copy.deepcopy(model)
    reference = mlp()
    for m in (twin, reference):
        F.cross_entropy(m(x), y).backward()
    assert relative_error(gradients(twin), gradients(reference)) == 0
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert engine.step == 0
    engine_on(twin).detach()


def test_a_copy_keeps_a_forward_of_its_own():
    model = mlp()
    model[1].forward = torch.relu
    model[0].forward = torch.nn.Linear.forward.__get__(model[0])
    engine_on(model)
    twin, x = copy.deepcopy(model), data(6)[0]
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))


def test_the_state_dict_of_the_model_is_unchanged():
    model = mlp()
    keys = list(model.state_dict())
    engine_on(model)
    assert list(model.state_dict()) == keys
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    twin = mlp(1)
    twin.load_state_dict(loaded)
    model.load_state_dict(loaded)
    assert torch.equal(values(twin), values(model))
    backward(model)
