"""Optimizers of every kind around an engine: noise comes once and first, and what cannot be private is refused.

Failure modes: 11 test_grad_scaler_is_refused; 19 test_noise_comes_once_however_often_the_optimizer_steps,
test_an_optimizer_within_backward_is_refused.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import LogicalBatchError, UnsupportedOptimizerError, UnsupportedParameterError
from tests.engine.script import UNWARNED, backward, data, engine_on, gradients, mlp, values
from tests.oracle import relative_error

pytestmark = UNWARNED


class SignSGD(torch.optim.Optimizer):
    """A foreign optimizer without state."""

    def __init__(self, parameters, lr, foreach=None):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    torch.optim.Adafactor, SignSGD,
]  # fmt: skip


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("foreach", [True, False])
def test_any_torch_optimizer_sees_the_private_gradient(optimizer_class, foreach):
    private, plain = mlp(), mlp()
    options = {} if optimizer_class is torch.optim.Adafactor and foreach else {"foreach": foreach}
    engine = engine_on(private, noise_multiplier=1.0)
    optimizers = [optimizer_class(m.parameters(), lr=0.1, **options) for m in (private, plain)]
    for step in range(3):
        backward(private)
        optimizers[0].step()
        for p, q in zip(private.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizers[1].step()
        optimizers[0].zero_grad()
        assert engine.step == step + 1
    assert torch.equal(values(private), values(plain))


def test_eight_bit_adam_sees_the_private_gradient():
    optimizer_class = pytest.importorskip("bitsandbytes").optim.Adam8bit
    private, plain = mlp().float(), mlp().float()
    engine = engine_on(private, noise_multiplier=1.0)
    optimizers = [optimizer_class(m.parameters(), lr=0.1, min_8bit_size=1) for m in (private, plain)]
    x, y = (t[:6] for t in data())
    for _ in range(3):
        F.cross_entropy(private(x.float()), y).backward()
        optimizers[0].step()
        for p, q in zip(private.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizers[1].step()
        optimizers[0].zero_grad()
    assert engine.step == 3
    assert torch.equal(values(private), values(plain))


def test_learning_rate_schedulers_work():
    model = mlp()
    engine = engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    rates = set()
    for _ in range(4):
        backward(model)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.add(scheduler.get_last_lr()[0])
    assert engine.step == 4
    assert len(rates) == 4


def test_two_optimizers_over_parts_of_one_model_are_one_release():
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    first = torch.optim.SGD(model[0].parameters(), lr=1.0)
    second = torch.optim.Adam(model[2].parameters(), lr=1.0)
    before = values(model)
    for step in range(2):
        backward(model)
        first.step()
        after_first = gradients(model)
        second.step()
        assert relative_error(gradients(model), after_first) == 0
        first.zero_grad()
        second.zero_grad()
        assert engine.step == step + 1
    assert (values(model) != before).all()


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        return super().step()


def test_noise_comes_once_however_often_the_optimizer_steps():
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    torch.optim.SGD(model.parameters(), lr=0.0)  # its step fires the hook, too
    optimizer = Twice(model.parameters(), lr=0.0)
    backward(model)
    engine.privatize()
    once = gradients(model)
    engine.privatize()
    optimizer.step()
    optimizer.step()
    assert relative_error(gradients(model), once) == 0
    assert engine.step == 1


def test_an_optimizer_of_other_parameters_is_left_alone():
    model, other = mlp(), mlp(1)
    engine = engine_on(model, noise_multiplier=1.0)
    backward(other)
    expected = gradients(other)
    backward(model)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert relative_error(gradients(other), expected) == 0
    assert engine.step == 0


def test_closures_are_evaluated_once():
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        x, y = data(6)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        assert math.isfinite(optimizer.step(closure).item())
    assert optimizer.step(closure=closure).item() > 0
    assert len(calls) == engine.step == 3
    assert float(model[0].weight.grad.abs().max()) > 0


def test_lbfgs_is_refused():
    model = mlp()
    engine_on(model)
    with pytest.raises(UnsupportedOptimizerError, match=r"LBFGS.*first-order"):
        torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(()))


class Restless(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return closure()


def test_an_optimizer_that_evaluates_its_closure_twice_is_refused():
    model = mlp()
    engine_on(model)
    backward(model)
    with pytest.raises(UnsupportedOptimizerError, match="closure more than once"):
        Restless(model.parameters(), lr=0.1).step(lambda: 0.0)


def test_grad_scaler_is_refused():
    model = mlp()
    engine = engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    x, y = data(6)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    before = values(model)
    with pytest.raises(UnsupportedOptimizerError, match=r"GradScaler.*bfloat16"):
        scaler.step(optimizer)
    assert torch.equal(values(model), before)
    assert engine.step == 0


def test_a_disabled_grad_scaler_is_no_harm():
    model = mlp()
    engine = engine_on(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backward(model)
    scaler.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert engine.step == 1


def test_a_foreign_parameter_with_a_gradient_is_refused():
    model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))
    engine = engine_on(model)
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1.0)
    x, y = data(6)
    F.cross_entropy(model(x) * temperature, y).backward()
    before = values(model)
    with pytest.raises(UnsupportedParameterError, match="outside of the private model"):
        optimizer.step()
    assert torch.equal(values(model), before)
    assert float(temperature.detach()) == 1
    assert engine.step <= 1


def test_a_foreign_parameter_without_a_gradient_is_no_harm():
    model, idle = mlp(), nn.Parameter(torch.ones(()))
    engine = engine_on(model)
    backward(model)
    torch.optim.SGD([*model.parameters(), idle], lr=1.0).step()
    assert engine.step == 1


def test_an_optimizer_within_backward_is_refused():
    """It would add noise before the other parameters' sums exist, and release those without noise."""
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=1.0)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    before = values(model)
    with pytest.raises(UnsupportedParameterError, match="hook"):
        backward(model)
    assert torch.equal(values(model), before)
    assert engine.step == 0


def test_a_step_within_backward_is_refused():
    model = mlp()
    engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = data(6)
    x.requires_grad_()
    x.register_hook(lambda _: optimizer.step())
    before = values(model)
    with pytest.raises(LogicalBatchError, match=r"within backward"):
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(values(model), before)


def test_a_model_half_held_by_optimizers_is_told_what_to_do():
    model = mlp()
    engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(LogicalBatchError, match=r"0\.weight.*freeze it"):
        backward(model)
