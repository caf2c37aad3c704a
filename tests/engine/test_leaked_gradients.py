"""Gradients that nobody clipped, and parameters that nobody registered, reach no update.

Failure modes: 8 test_a_leaked_gradient_never_reaches_an_update, test_a_parameter_made_trainable_later_is_refused;
19 test_gradients_may_be_changed_after_the_noise_alone; 2 test_a_conjugated_gradient_gets_its_noise.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.backends.checksums import checksum
from dpshard.clipping import scheme
from dpshard.errors import LogicalBatchError, UnsupportedParameterError, VerificationError
from tests import accelerator
from tests.engine.script import UNWARNED, D, P, backward, data, engine_on, gradients, mlp, values
from tests.oracle import (
    clipped_mean,
    gradients_of,
    noise_free_engine,
    per_sample_gradients,
    ramp_loss,
    randn,
    relative_error,
)

pytestmark = UNWARNED

DIRECT = "a gradient reached it along a path"


def regularised(model, x, y):
    return F.cross_entropy(model(x), y) + 0.1 * model[0].weight.square().sum()


def regularised_first(model, x, y):
    return 0.1 * model[0].weight.square().sum() + F.cross_entropy(model(x), y)


class _Invisible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(P, D, dtype=torch.float64))

    def forward(self, x):
        return _Invisible.apply(x, self.weight)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_scripted)


def _scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t())


class Scripted(OwnFunction):
    def __init__(self):
        super().__init__()
        self.run = [scripted()]

    def forward(self, x):
        return self.run[0](x, self.weight)


def by_hand(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return loss.detach().requires_grad_()


def added_by_hand(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    model[0].weight.grad += 1
    return loss.detach().requires_grad_()


def direct_use(model, x, y):
    return F.cross_entropy(model(x) + F.linear(x, model[0].weight)[:, :P], y)


def eval_forward(model, x, y):
    model.eval()
    loss = F.cross_entropy(model(x), y)
    model.train()
    return loss


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (mlp, regularised),
        (mlp, regularised_first),
        (mlp, by_hand),
        (mlp, added_by_hand),
        (mlp, direct_use),
        (mlp, eval_forward),
        (OwnFunction, lambda m, x, y: F.cross_entropy(m(x), y)),
        (Scripted, lambda m, x, y: F.cross_entropy(m(x), y)),
    ],
    ids=["regulariser", "regulariser first", "by hand", "added", "direct", "eval", "autograd.Function", "jit.script"],
)
def test_a_leaked_gradient_never_reaches_an_update(make, loss, verify):
    model = make()
    engine_on(model, noise_multiplier=1e-3, verify=verify)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = values(model)
    with pytest.raises((UnsupportedParameterError, LogicalBatchError, VerificationError), match=r"weight|2.bias"):  # noqa: PT012
        for _ in range(2):
            loss(model, *data(6)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(values(model), before)


def test_a_model_that_was_never_put_into_training_mode_is_refused():
    """As from_pretrained returns it."""
    model = mlp().eval()
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match=r"2\.bias: .* in eval mode .* model\.train\(\) before"):
        backward(model)


def test_a_gradient_set_on_a_parameter_without_one_is_refused():
    model = mlp()
    engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = values(model)
    with pytest.raises(LogicalBatchError, match=r"0\.weight still has a gradient"):
        optimizer.step()
    assert torch.equal(values(model), before)


def test_a_gradient_that_never_arrived_does_not_let_another_pass():
    """The next raw gradient may reuse the memory of a clipped sum that was not accumulated."""
    model = mlp()
    engine_on(model)
    x, y = data(6)
    F.cross_entropy(model(x), y).backward(inputs=[model[2].weight])
    for p in (model[0].weight, model[0].bias, model[2].bias):
        with pytest.raises(UnsupportedParameterError, match=DIRECT):
            p.square().sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(100),
        lambda p: p.grad.data.mul_(100),  # a write that torch does not count
        lambda p: nn.utils.clip_grad_norm_([p], 1e-6),
    ],
)
def test_gradients_may_be_changed_after_the_noise_alone(change):
    model = mlp()
    engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)
    change(model[0].weight)
    before = values(model)
    with pytest.raises(LogicalBatchError, match=r"0\.weight.*engine\.privatize\(\) first"):
        optimizer.step()
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("waits", [False, True])
def test_a_change_between_two_backwards_is_refused_at_the_release_at_the_latest(waits, monkeypatch):
    """A change that the next backward adds to is invisible later; on an accelerator only the release checks."""
    model = mlp()
    engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = values(model)
    if waits:
        accelerator.pretend(monkeypatch)
    backward(model, slice(0, 3))
    model[0].weight.grad.data.mul_(100)
    if waits:
        backward(model, slice(3, 6))
    with pytest.raises(LogicalBatchError, match=r"0\.weight.*engine\.privatize\(\) first"):
        optimizer.step() if waits else backward(model, slice(3, 6))
    assert torch.equal(values(model), before)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_module_hook_that_writes_to_gradients_within_a_backward_is_refused(again, everywhere, monkeypatch):
    """It writes through `.data`, which torch does not count, after the next layer has its gradient."""
    monkeypatch.setitem(scheme.WAITING, "cpu", 0)  # layers so small would get theirs after the hook
    model = mlp()
    engine_on(model, clipping_style="layer-wise", verify=False)
    if again:
        backward(model, slice(0, 3))

    def scale(module, *_):
        if module is model[1] and model[2].weight.grad is not None:
            model[2].weight.grad.data.mul_(100)

    def backward_and_step():
        backward(model, slice(3, 6))
        torch.optim.SGD(model.parameters(), lr=1.0).step()

    of_all = nn.modules.module.register_module_full_backward_hook
    handle = (of_all if everywhere else model[1].register_full_backward_hook)(scale)
    try:
        with pytest.raises(LogicalBatchError, match=r"2\.weight.*engine\.privatize\(\) first"):
            backward_and_step()
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.25, 0.5, -2.0, 2.0, 4.0])
def test_a_factor_of_two_is_no_blind_spot_of_the_checksum(dtype, factor):
    """A factor of two adds the same to the bits of every element: over 4,096 words of 64 bits, a multiple of 2^64."""
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for x in (gradient, gradient.t(), gradient[1:, 1:], gradient[0, 0]):
        before = checksum(x)
        assert checksum(x.clone()) == before
        assert checksum(x * factor) != before


def replaced(p):
    p.grad = torch.full_like(p, 1e6)


def dropped(p):
    p.grad = None


@pytest.mark.parametrize("change", [replaced, dropped])
def test_the_sums_that_were_digested_are_released_whatever_lies_there_by_then(change):
    """A note of the release is the last foreign code before the noise."""
    wanted, model = mlp(), mlp()
    engine_on(wanted).internals.note_releases(lambda step, identity: lambda: None)
    engine = engine_on(model)
    engine.internals.note_releases(lambda step, identity: change(model[0].weight) or (lambda: None))
    for each in (wanted, model):
        backward(each)
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    assert values(model).equal(values(wanted))


def test_privatize_may_come_before_the_step():
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = values(model)
    backward(model)
    engine.privatize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    seen = gradients(model)
    optimizer.step()
    torch.testing.assert_close(before - values(model), torch.cat([g.flatten() for g in seen.values()]))
    assert engine.step == 1


def test_hooks_of_others_are_refused():
    model = mlp()
    engine_on(model)
    backward(model)
    handle = model[2].bias.register_hook(lambda g: 100 * g)
    with pytest.raises(UnsupportedParameterError, match=r"2\.bias has a gradient hook"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    handle.remove()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def forget_hooks(parameter):
    parameter._backward_hooks.clear()


def swap_hooks(parameter):
    """As many hooks as before."""
    forget_hooks(parameter)
    parameter.register_hook(lambda g: g)


@pytest.mark.parametrize("lose", [forget_hooks, swap_hooks])
@pytest.mark.parametrize("after_backward", [False, True])
def test_without_its_hooks_no_gradient_passes(lose, after_backward):
    """The next gradient would reach `.grad` unclipped."""
    model = mlp()
    engine_on(model)
    if after_backward:
        backward(model)
    lose(model[2].bias)
    with pytest.raises(UnsupportedParameterError, match=r"2\.bias has lost the gradient hook"):
        torch.optim.SGD(model.parameters(), lr=1.0).step() if after_backward else backward(model)
    with pytest.raises((UnsupportedParameterError, LogicalBatchError)):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("first", [False, True])
def test_a_gradient_that_met_no_hook_is_refused_at_the_release(first):
    """The store records a gradient when it puts it in `.grad`, whatever autograd says."""
    model = mlp()
    engine_on(model)
    bias = model[2].bias
    hooks = dict(bias._backward_hooks)

    def leak():
        bias._backward_hooks.clear()
        bias.square().sum().backward()
        bias._backward_hooks.update(hooks)

    for run in (leak, lambda: backward(model)) if first else (lambda: backward(model), leak):
        try:
            run()
        except LogicalBatchError:
            assert first
            break
    with pytest.raises(LogicalBatchError, match=r"2\.bias"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_backward_for_some_parameters_brings_sums_to_these():
    model = mlp()
    engine_on(model)
    x, y = data(6)
    F.cross_entropy(model(x), y).backward(inputs=[model[2].weight])
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["2.weight"]
    wanted = mlp()
    engine_on(wanted)
    F.cross_entropy(wanted(x), y).backward()
    assert model[2].weight.grad.equal(wanted[2].weight.grad)


def unfreeze(model):
    model[0].requires_grad_(True)


def replace(model):
    model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))


def assign(model):
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model[0].requires_grad_(True)
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [unfreeze, replace, assign])
@pytest.mark.parametrize("own_optimizer", [True, False])
@pytest.mark.parametrize("in_between", [True, False])
def test_a_parameter_made_trainable_later_is_refused(change, own_optimizer, in_between):
    model = mlp()
    model[0].requires_grad_(False)
    engine_on(model)
    if in_between:
        backward(model)
    change(model)
    before = values(model)
    with pytest.raises(UnsupportedParameterError, match=r"0\.weight|outside of the private model"):  # noqa: PT012
        backward(model)
        torch.optim.SGD(model[0].parameters() if own_optimizer else model.parameters(), lr=1.0).step()
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("in_between", [True, False])
def test_adapters_that_come_after_the_engine_are_refused(in_between):
    """Like get_peft_model: all parameters that the engine knows are frozen."""
    model = mlp()
    engine_on(model)
    if in_between:
        backward(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.zero_grad()
    model.requires_grad_(False)
    model[2].register_module("adapter", nn.Linear(8, P).double())
    with pytest.raises(UnsupportedParameterError, match=r"2\.adapter\.weight became trainable.* after the engine"):
        backward(model)


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_may_be_frozen_later(first):
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if not first:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
    assert engine.step == 2 - first


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
def test_gradients_are_not_handed_out_before_the_noise(style):
    """A manual update from torch.autograd.grad, which no optimizer or ledger would see."""
    model = nn.Linear(4, 2).double()
    engine = noise_free_engine(model, batch_size=3, clipping_style=style)
    x = randn(3, 4)
    with pytest.raises(LogicalBatchError, match=r"autograd\.grad.*without noise.*engine\.privatize"):
        torch.autograd.grad(model(x).square().sum(1).mean(), list(model.parameters()))
    with pytest.raises(LogicalBatchError, match=r"autograd\.grad.*without noise"):  # of one, not the group's first
        torch.autograd.grad(model(x).square().sum(1).mean(), [model.bias])
    model(x).square().sum(1).mean().backward()
    engine.privatize()
    assert engine.step == 1
    assert float(model.weight.grad.norm()) > 0


def test_gradients_of_inputs_may_be_asked_for():
    """Like adversarial training: they reach parameters only through the loss."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    plain = copy.deepcopy(model)

    def adversarial(model, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ramp_loss(model(x)), x)
        return (x + 0.1 * gradient.sign()).detach()

    x = randn(6, 4)
    expected = clipped_mean(per_sample_gradients(plain, [adversarial(plain, x)]), max_grad_norm=0.1, batch_size=6)
    engine = noise_free_engine(model, batch_size=6, max_grad_norm=0.1)
    ramp_loss(model(adversarial(model, x))).backward()
    engine.privatize()
    assert relative_error(gradients_of(model), expected) < 1e-12


class Hidden(nn.Module):
    """Keeps its hidden units."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        self.hidden = torch.tanh(self.first(x))
        return self.second(self.hidden)


def by_grad(model, x, loss):
    torch.autograd.grad(loss, model.hidden, retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)


def by_inputs(model, x, loss):
    model.hidden.retain_grad()
    loss.backward(inputs=[model.hidden, x], retain_graph=True)


@pytest.mark.parametrize("ask", [by_grad, by_inputs])
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_a_backward_for_other_gradients_counts_no_sample(ask, style):
    """It reaches the second layer's taps; its gradients must not add to those of the loss."""
    model, x = Hidden().double(), randn(6, 4).requires_grad_()
    samples = per_sample_gradients(copy.deepcopy(model), [x.detach()])
    groups = None if style == "all-layer" else [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
    expected = clipped_mean(samples, max_grad_norm=0.1, batch_size=6, groups=groups)
    engine = noise_free_engine(model, batch_size=6, max_grad_norm=0.1, clipping_style=groups or style)
    loss = ramp_loss(model(x))
    ask(model, x, loss)
    loss.backward()
    engine.privatize()
    assert relative_error(gradients_of(model), expected) < 1e-12


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(4, 3).to(torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).real


def test_a_conjugated_gradient_gets_its_noise():
    """Real parts of a lazily conjugated tensor are a copy."""
    model, x = Turned(), randn(6, 4)
    engine = noise_free_engine(model, batch_size=6, noise_multiplier=1.0, max_grad_norm=1.0, verify=False)
    model.weight.grad = torch.zeros_like(model.weight).conj()
    ramp_loss(model(x)).backward()
    engine.privatize()
    assert model.weight.grad.imag.all()  # sums are real, noise is not
