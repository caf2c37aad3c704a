"""Several forwards and backwards on the same samples, and those that fail.

Failure mode: 7 test_two_forwards_on_one_micro_batch_are_one_gradient_per_sample.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import LogicalBatchError, UnsupportedParameterError
from tests.engine.script import STYLES, UNWARNED, D, P, data, engine_on, first_of, gradients, mlp
from tests.oracle import clipped_mean, per_sample_gradients, relative_error, there

pytestmark = UNWARNED


def test_two_backward_calls_on_one_micro_batch_are_refused():
    model = mlp()
    engine = engine_on(model)
    for x, y in first_of(engine, 4):
        output = model(x)
        first, second = F.cross_entropy(output, y), output.square().mean()
        first.backward(retain_graph=True)
        with pytest.raises(LogicalBatchError, match="once per micro-batch"):
            second.backward()
        with pytest.raises(LogicalBatchError, match="once per micro-batch"):
            F.cross_entropy(model(x), y).backward()
        break


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_second_backward_through_one_graph_is_refused(style, mode):
    model = mlp()
    engine_on(model, clipping_style=style, clipping_mode=mode)
    x, y = data(6)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(LogicalBatchError, match=r"twice|again|once"):
        loss.backward()


def test_two_forwards_before_one_backward_in_an_own_loop():
    model = mlp()
    x, y = there(model, data(12))
    per_sample = per_sample_gradients(model, (x, y), F.cross_entropy)
    expected = clipped_mean(per_sample, max_grad_norm=1.0, batch_size=6)
    engine = engine_on(model)
    (F.cross_entropy(model(x[:4]), y[:4]) + F.cross_entropy(model(x[4:]), y[4:])).backward()
    engine.privatize()
    assert relative_error(gradients(model), expected) < 1e-12


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
def test_two_forwards_and_two_backwards_in_an_own_loop(style):
    model = mlp()
    x, y = there(model, data(12))
    per_sample = per_sample_gradients(model, (x, y), F.cross_entropy)
    groups = [[name] for name in per_sample[0]] if style == "param-wise" else None
    expected = clipped_mean(per_sample, max_grad_norm=1.0, batch_size=6, groups=groups)
    engine = engine_on(model, clipping_style=style)
    first, second = F.cross_entropy(model(x[:4]), y[:4]), F.cross_entropy(model(x[4:]), y[4:])
    first.backward()
    second.backward()
    engine.privatize()
    assert relative_error(gradients(model), expected) < 1e-12


class Pair(nn.Module):
    """Called in two ways: with one input, or with two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, P, dtype=torch.float64)

    def forward(self, x, other=None):
        return self.linear(x) if other is None else self.linear(x) * self.linear(other)


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
@pytest.mark.parametrize("kinds", [1, 2])
def test_two_forwards_on_one_micro_batch_are_one_gradient_per_sample(style, kinds):
    torch.manual_seed(0)
    model = Pair()

    def loss_of(run, x, y):
        output = run(x) + (run(-2 * x) if kinds == 1 else run(x, 0.5 * x))
        return F.cross_entropy(output, y)

    engine = engine_on(model, clipping_style=style)
    taken = []
    for x, y in (logical_batch := first_of(engine, 16)):
        loss_of(model, x, y).backward()
        taken.append((x, y, logical_batch.micro.plan.is_padding))
    engine.privatize()
    found = gradients(model)
    engine.detach()
    x, y = (torch.cat([t[i][~t[2]] for t in taken]) for i in (0, 1))
    assert 0 < len(x) < 16
    names, parameters = list(dict(model.named_parameters())), list(model.parameters())
    losses = [loss_of(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    per_sample = [dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)) for loss in losses]
    groups = [[name] for name in per_sample[0]] if style == "param-wise" else None
    expected = clipped_mean(per_sample, max_grad_norm=1.0, batch_size=6, groups=groups)
    assert relative_error(found, expected) < 1e-12


def test_two_passes_refuse_two_forwards_on_one_micro_batch():
    model = mlp()
    engine = engine_on(model, clipping_mode="ghost")
    for x, _ in first_of(engine, 4):
        model(x)
        with pytest.raises(LogicalBatchError, match='"bk"'):
            model(x)
        break


def test_a_gradient_of_a_gradient_is_refused():
    """A gradient penalty differentiates backward itself, in which rules see cut-off parameters."""
    model, (x, y) = mlp(), data(6)
    engine_on(model)
    output = model(x.requires_grad_())
    loss = F.cross_entropy(output, y)
    with pytest.raises(UnsupportedParameterError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError("out of luck")


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(D, 8, dtype=torch.float64), nn.Linear(8, P, dtype=torch.float64)
        self.fails = False

    def forward(self, x):
        x = self.first(x)
        return self.second(Fails.apply(x) if self.fails else x)


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("where", ["after forward", "inside backward"])
def test_an_exception_does_not_poison_the_next_step(style, mode, where):
    model = Fragile()
    x, y = there(model, data(12))
    per_sample = per_sample_gradients(model, (x[6:], y[6:]), F.cross_entropy)
    groups = [["first.weight", "first.bias"], ["second.weight", "second.bias"]] if style == "layer-wise" else None
    expected = clipped_mean(per_sample, max_grad_norm=1.0, batch_size=6, groups=groups)
    engine = engine_on(model, clipping_style=style, clipping_mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.fails = where == "inside backward"
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        loss = F.cross_entropy(model(x[:6]), y[:6])
        if model.fails:
            loss.backward()
        raise ZeroDivisionError
    model.fails = False
    optimizer.zero_grad()
    for attempt in range(2):
        F.cross_entropy(model(x[6:]), y[6:]).backward()
        if attempt == 0 and where == "after forward":
            # For all the engine knows, both are of one logical batch, and half of it would be released.
            with pytest.raises(LogicalBatchError, match="Feed all rows of this logical batch again"):
                optimizer.step()
            continue
        optimizer.step()
        break
    assert relative_error(gradients(model), expected) < 1e-12
    assert engine.step == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_failed_backward_is_not_released(dtype):
    """Of a part of its samples the layers behind would count, and those before would not; fed again, all do."""
    model = Fragile().to(dtype)
    engine = engine_on(model, clipping_style="layer-wise", verify=False)
    x, y = data(12)
    x = x.to(dtype)

    def feed(failing):
        for begin in (0, 4, 8):
            model.fails = begin == failing
            with pytest.raises(ZeroDivisionError) if model.fails else contextlib.nullcontext():
                F.cross_entropy(model(x[begin : begin + 4]), y[begin : begin + 4]).backward()

    feed(4)
    with pytest.raises(LogicalBatchError, match="half-way"):
        engine.privatize()
    assert engine.step == 0
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    feed(None)
    engine.privatize()
    groups = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
    expected = clipped_mean(
        per_sample_gradients(Fragile().double(), data(12), F.cross_entropy),
        max_grad_norm=1.0,
        batch_size=6,
        groups=groups,
    )
    assert relative_error({name: g.double() for name, g in gradients(model).items()}, expected) < 2e-2


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_an_exception_inside_backward_counts_no_sample_twice(style):
    model = Fragile()
    engine = engine_on(model, clipping_style=style, verify=False)
    for x, y in first_of(engine, 24):
        model.fails = True
        with pytest.raises(ZeroDivisionError):
            F.cross_entropy(model(x), y).backward()
        model.fails = False
        with pytest.raises(LogicalBatchError, match=r"neither be repeated nor left out|once per micro-batch"):
            F.cross_entropy(model(x), y).backward()
