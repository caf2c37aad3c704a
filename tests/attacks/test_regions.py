"""Compiled regions whose calls look alike: the records are those of the call now.

Failure modes: 13, rows of a region are grouped by the number of samples, or by the order of rows, of an earlier call
with equal shapes, so several samples are clipped as one, or one sample as several; a backward uses the stride, epsilon
or buffer that a module had before.
"""

import enum
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard.errors import UnsupportedParameterError
from tests.attacks.exact_steps import require_exact_steps, uncompiled
from tests.attacks.oracle import clipped_sum
from tests.oracle import noise_free_engine, randn, relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Order(enum.Enum):
    SAMPLES, TIMES = "samples", "times"


class Flat(nn.Module):
    """A compiled block on the rows of all samples, in an order that an argument chooses."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.block.compile(backend="aot_eager")

    def forward(self, x, order=Order.SAMPLES):
        if order in (Order.TIMES, True):
            return self.block(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 4).transpose(0, 1)
        return self.block(x.reshape(-1, 4)).view(x.shape)


@pytest.mark.parametrize("shapes", [[(2, 20), (18, 1), (2, 9)], [(4, 9), (36, 1), (2, 18), (36, 1)]])
@pytest.mark.parametrize("verify", [True, False])
def test_as_many_rows_may_be_of_another_number_of_samples(shapes, verify):
    calls = [(randn(*shape, 4), ()) for shape in shapes]
    require_exact_steps(Flat().double(), calls, verify=verify)


@pytest.mark.parametrize("orders", [[Order.SAMPLES, Order.TIMES] * 2, [False, True] * 2])
def test_an_argument_may_choose_the_order_of_rows(orders):
    require_exact_steps(Flat().double(), [(randn(6, 4, 4), (order,)) for order in orders])


def test_micro_batches_of_one_step_may_differ_in_the_order_of_rows():
    """Under engine.batches: a wrong group of rows moved a sum by four times the bound of a sample."""

    def loop(model, engine, optimizer, dataset):
        for batch in engine.batches(dataset, micro_batch_size=4):
            for i, (x,) in enumerate(batch):
                (model(x, i == 1).flatten(1).sum(1) * 50).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    data = TensorDataset(torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(1)))
    expected = clipped_sum(lambda: uncompiled(Flat()), loop, data, max_grad_norm=1.0)
    found = clipped_sum(Flat, loop, data, max_grad_norm=1.0)
    assert relative_error(found, expected) <= 1e-5


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(3, 8)), nn.Buffer(torch.ones(3, 8))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask)


class Scaled(nn.Module):
    """A constant that an object holds."""

    def __init__(self):
        super().__init__()
        self.norm, self.options = nn.LayerNorm(8), SimpleNamespace(eps=1e-5)

    def forward(self, x):
        return F.layer_norm(x, (8,), self.norm.weight, self.norm.bias, self.options.eps)


class Listed(Scaled):
    def __init__(self):
        super().__init__()
        self.options = [self.options]

    def forward(self, x):
        return F.layer_norm(x, (8,), self.norm.weight, self.norm.bias, self.options[0].eps)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.eval()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(x)


CHANGES = {
    "dilation": (lambda: nn.Conv1d(3, 3, 3, padding=1), {"dilation": (2,), "padding": (2,)}),
    "groups of channels": (lambda: nn.GroupNorm(1, 3), {"num_groups": 3}),
    "epsilon": (lambda: nn.LayerNorm(8), {"eps": 0.4}),
    "mean": (Frozen, {"norm.running_mean": torch.ones(3)}),
    "mask": (Masked, {"mask": torch.eye(3, 8)}),
    "option": (Scaled, {"options.eps": 0.4}),
    "option in a list": (Listed, {"options[0].eps": 0.4}),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_changed_attribute_counts_from_the_next_call(what, verify):
    build, values = CHANGES[what]
    model = nn.Sequential(nn.Linear(8, 8), build()).double().train()
    before = {path: at(model[1], path) for path in values}

    def change(model):
        for path, was in before.items():
            owner, name = owner_of(model[1], path)
            new = values[path].double() if isinstance(was, torch.Tensor) else values[path]
            setattr(owner, name, new if getattr(owner, name) is was or same(getattr(owner, name), was) else was)

    model.compile(backend="aot_eager")
    require_exact_steps(model, [(randn(6, 3, 8), ()) for _ in range(5)], change, changes=(2, 4), verify=verify)


@dataclass
class Options:
    """An argument that no pytree opens."""

    groups: Any
    weights: torch.Tensor


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, x, options):
        return F.group_norm(self.linear(x), int(options.groups), self.weight) * options.weights


@pytest.mark.parametrize("verify", [True, False])
def test_the_contents_of_an_argument_count(verify):
    model = Grouped().double()
    model.compile(backend="aot_eager")
    contents = [(4, 8), (4, 8), (2, 8), (np.int64(4), 1), (np.int64(2), 1), (True, 1), (1, 8)]
    calls = [(randn(6, 8), (Options(groups, randn(size)),)) for groups, size in contents]
    require_exact_steps(model, calls, verify=verify)


class Blocks(nn.Module):
    """Compiled blocks; the first is given one scale, then another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaling() for _ in range(2))
        self.scales = nn.ParameterList(torch.rand(4) for _ in range(2))
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x):
        x = self.blocks[0](self.blocks[0](x, self.scales[0]), self.scales[1])
        return self.blocks[1](x, self.scales[1])


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x, scale):
        return self.linear(x * scale).tanh() * self.own


@pytest.mark.parametrize("frozen", ["own", "bias", "blocks.0", "scales.1"])
def test_parameters_may_be_frozen_for_some_steps(frozen):
    def toggle(model):
        for name, parameter in model.named_parameters():
            if frozen in name:
                parameter.requires_grad_(not parameter.requires_grad)

    calls = [(randn(6, 3, 4), ()) for _ in range(6)]
    require_exact_steps(Blocks().double(), calls, toggle, changes=(2, 4, 5))


def test_weights_may_be_tied_between_steps():
    def tie(model):
        model[2].weight = model[0].weight

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model.compile(backend="aot_eager")
    require_exact_steps(model, [(randn(6, 4), ()) for _ in range(3)], tie, changes=(1,))


class Target(nn.Module):
    """The target is a layer's own output, computed without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            target = self.first(x)
        return self.second(self.first(x)) - target


@pytest.mark.parametrize("verify", [True, False])
def test_a_part_without_gradients_has_no_slot(verify):
    model = Target().double()
    model.compile(backend="aot_eager")
    require_exact_steps(model, [(randn(6, 3, 4), ())] * 3, verify=verify)


def same(x, y):
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def owner_of(x, path):
    *parents, name = path.split(".")
    for parent in parents:
        attribute, _, item = parent.partition("[")
        x = getattr(x, attribute)[int(item[:-1])] if item else getattr(x, attribute)
    return x, name


def at(x, path):
    return getattr(*owner_of(x, path))


def test_a_region_that_counts_its_calls_is_rehearsed_once(monkeypatch):
    """Its own writes are no change, or each forward would run twice."""
    from dpshard.interception.compiled import CompiledRegions

    class Counting(nn.Linear):
        calls = 0

        def forward(self, input):
            self.calls += 1
            self.latest = input.detach()
            return super().forward(input)

    rehearsals = []
    rehearse = CompiledRegions._rehearse
    monkeypatch.setattr(CompiledRegions, "_rehearse", lambda self, *args: rehearsals.append(1) or rehearse(self, *args))
    model = nn.Sequential(Counting(8, 8), nn.Tanh()).double()
    model[0].compile(backend="eager")
    require_exact_steps(model, [(randn(6, 8), ())] * 4)
    assert len(rehearsals) <= 3  # two of them for numbers of samples that verification takes


SWAPPED = [False]


class Swapped(nn.Module):
    """One weight meets the rows in two orders; a function or a global decides which comes first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def by_samples(self, x):
        return F.linear(x.reshape(-1, 4), self.weight).view(x.shape)

    def by_times(self, x):
        B, T, _ = x.shape
        return torch.matmul(x.transpose(0, 1).reshape(T * B, 4), self.weight).view(T, B, 4).transpose(0, 1)

    def forward(self, x, swapped=lambda: False):
        if swapped() or SWAPPED[0]:
            b, a = self.by_times(x), self.by_samples(x)
        else:
            a, b = self.by_samples(x), self.by_times(x)
        return a.sin() + b


class Chooses:
    def __init__(self, answer):
        self.answer = answer

    def __call__(self):
        return self.answer

    def method(self):
        return self.answer


@pytest.mark.parametrize(
    "swapped",
    [
        lambda answer: (lambda: True) if answer else (lambda: False),
        lambda answer: lambda: answer,
        lambda answer: Chooses(answer),
        lambda answer: Chooses(answer).method,
    ],
    ids=["functions", "closure", "object", "method"],
)
def test_a_function_may_swap_the_uses_of_a_weight(swapped):
    """By the uses of the call before, rows of four samples were one: 5.2 times the bound."""
    model = Swapped()
    model.compile(backend="aot_eager")
    answers = False, True, False
    require_exact_steps(model.double(), [(randn(6, 6, 4), (swapped(answer),)) for answer in answers], verify=False)


def test_a_global_that_swaps_the_uses_of_a_weight_is_refused():
    model = Swapped().double()
    model.compile(backend="aot_eager")
    noise_free_engine(model, batch_size=6, steps=2, verify=False)
    x = randn(6, 6, 4)
    model(x).sum().backward()
    SWAPPED[0] = True
    try:
        with pytest.raises(UnsupportedParameterError, match="the same ones in another order"):
            model(x)
    finally:
        SWAPPED[0] = False
