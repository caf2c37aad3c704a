"""Groups that wait for each other, and close before their anchor: as exact as groups that close alone.

Failure modes: 2 test_a_gradient_written_while_its_group_waits_is_refused and
test_sums_that_wait_for_other_ranks_are_withheld; 7 test_two_backwards_reach_groups_of_one_anchor;
19 test_a_group_does_not_close_twice and test_a_forward_within_backward_counts_no_sample.
"""

import pytest
import torch
from torch import nn

from dpshard.clipping import scheme
from dpshard.clipping.closer import Closer
from dpshard.clipping.functions import AbadiClipping
from dpshard.clipping.group_tape import Roots
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.scheme import Scheme
from dpshard.config import CLIPPING_MODES
from dpshard.errors import DpshardError, LogicalBatchError
from dpshard.verification.gradients import Found
from tests.clipping.test_stacks import B, Blocks, D, R, T, groups_of, step_error
from tests.oracle import (
    TOLERANCE,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    norm,
    per_sample_gradients,
    private_step,
    ramp_loss,
    randn,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

OPTIONS = {"max_grad_norm": R, "verify": False}
USE = B * T * 2 * D * 8
"""Bytes of a linear layer's activations and gradients; its sum has 240."""


class Waits:
    """What happens at anchors: groups that close early or by their anchor, and the most bytes that wait."""

    def __init__(self, monkeypatch):
        self.early, self.late, self.most = [], [], 0
        self.together = []  # groups that closed early with each other
        close_early, close, join = Closer._close_early, Closer.close, Closer.joins_others

        def closing_early(tape, anchor, indices):
            self.early += indices
            self.together.append([*indices])
            close_early(tape, anchor, indices)

        def closing(tape, anchor):
            before = set(tape.closed)
            close(tape, anchor)
            self.late += tape.closed - before

        def joining(tape, *arguments):
            joined = join(tape, *arguments)
            self.most = max(self.most, sum(stacks.nbytes for stacks in tape._stacks.values()))
            return joined

        monkeypatch.setattr(Closer, "_close_early", closing_early)
        monkeypatch.setattr(Closer, "close", closing)
        monkeypatch.setattr(Closer, "joins_others", joining)


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("style", ["layer-wise", "block-wise", "halves"])
def test_groups_that_close_early_are_exact(style, compiled, waits, monkeypatch):
    """Two blocks share an anchor, and their records exceed what may wait."""
    torch._dynamo.reset()
    monkeypatch.setitem(scheme.WAITING, "cpu", 1000)
    blocks = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(6)]
    model = Blocks().double()
    model.blocks = nn.ModuleList(blocks).double()
    if compiled:  # of a model that is compiled as a whole, all records arrive together
        for block in model.blocks:
            block.compile(backend="aot_eager")
    assert step_error(model, randn(B, T, D), style) <= TOLERANCE
    assert sorted(waits.early + waits.late) == [*range(len(groups_of(model, style)))]  # each closes once
    if style != "halves":
        assert waits.early
        assert waits.late
        assert waits.most <= 1000 + 2 * USE
    torch._dynamo.reset()


@pytest.mark.parametrize("style", ["param-wise", "layer-wise", "block-wise"])
def test_all_groups_wait_for_one_anchor(style, waits):
    model = Blocks().double()
    groups = [[name] for name, _ in model.named_parameters()] if style == "param-wise" else groups_of(model, style)
    expected = clipped_mean(
        per_sample_gradients(model, (x := randn(B, T, D),)), max_grad_norm=R, batch_size=B, groups=groups
    )
    update = private_step(model, (x,), ramp_loss, clipping_style=style, **OPTIONS)
    assert relative_error(update, expected) <= TOLERANCE
    assert waits.early == []
    assert sorted(waits.late) == [*range(len(groups))]


def of_layers(model, x):
    """Return the oracle's update of layer-wise clipping."""
    groups = groups_of(model, "layer-wise")
    return clipped_mean(per_sample_gradients(model, (x,)), max_grad_norm=R, batch_size=B, groups=groups)


class Wide(nn.Module):
    """Blocks with a small and a large layer, in one order or the other."""

    def __init__(self, reverse):
        super().__init__()
        self.reached = lambda block: None
        torch.manual_seed(0)

        def layers():
            if reverse:
                return [nn.Linear(D, 1024), nn.Linear(1024, D), nn.LayerNorm(D)]
            return [nn.LayerNorm(D), nn.Linear(D, 1024), nn.Linear(1024, D)]

        self.blocks = nn.ModuleList(nn.Sequential(*layers()) for _ in range(3))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if x.requires_grad:
                x.register_hook(lambda _, i=i: self.reached(i))
            x = x + block(x)
        return x


@pytest.mark.parametrize("reverse", [False, True])
def test_a_group_with_large_records_closes_with_its_last_one(reverse, waits, monkeypatch):
    """Otherwise large records of several blocks would wait for one anchor, if a small layer comes last or first."""
    model, x, closed = Wide(reverse).double(), randn(B, 64, D), []
    groups = [[n for n, _ in model.named_parameters() if n.startswith(f"blocks.{i}.")] for i in range(3)]
    expected = clipped_mean(per_sample_gradients(model, (x,)), max_grad_norm=R, batch_size=B, groups=groups)
    model.reached = lambda block: closed.append((block, sorted(waits.early)))
    update = private_step(model, (x,), ramp_loss, clipping_style=groups, **OPTIONS)
    assert relative_error(update, expected) <= TOLERANCE
    assert closed == [(2, [2]), (1, [1, 2])]


LARGE = B * 1024 * D * 8
"""Bytes of the per-sample gradients of a large layer's weight."""


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("most", "together"), [(0, [1] * 6), (3 * LARGE, [3, 3]), (2 * LARGE, [2] * 3), (100 * LARGE, [])]
)
def test_complete_groups_wait_for_each_other(reverse, most, together, waits, monkeypatch):
    """Nine groups; LayerNorms have small records."""
    monkeypatch.setitem(scheme.COMPLETE, "cpu", most)
    model, x = Wide(reverse).double(), randn(B, 64, D)
    update = private_step(model, (x,), ramp_loss, clipping_style="layer-wise", **OPTIONS)
    assert relative_error(update, of_layers(model, x)) <= TOLERANCE
    assert [*map(len, waits.together)] == together
    assert sorted(waits.early + waits.late) == [*range(9)]


class Towers(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, D))
        self.two = nn.Sequential(nn.Linear(D, 2 * width), nn.Tanh(), nn.Linear(2 * width, D))

    def forward(self, x):
        return self.one(x), self.two(x)


def of_towers(output):
    one, two = output
    return ramp_loss(one) + ramp_loss(two.cos())


def in_two_backwards(style, width=D):
    """Return the update of two backwards, one a tower, and the model and data."""
    model, x = Towers(width).double(), randn(B, D)
    engine = noise_free_engine(model, batch_size=B, clipping_style=style, **OPTIONS)
    try:
        one, two = model(x)
        ramp_loss(one).backward()
        ramp_loss(two.cos()).backward()
        engine.privatize()
        return model, x, gradients_of(model)
    finally:
        engine.detach()
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("width", [D, 4096])
def test_two_backwards_reach_groups_of_one_anchor(width, waits, monkeypatch):
    """The anchor runs twice; the first time without the groups of the second backward.

    Of wide towers, the complete groups of the first wait for the anchor, and those of the second are too large.
    """
    monkeypatch.setitem(scheme.COMPLETE, "cpu", 5 * B * width * 8)
    model, x, update = in_two_backwards("layer-wise", width)
    names = [name for name, _ in model.named_parameters()]
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    expected = clipped_mean(per_sample_gradients(model, (x,), of_towers), max_grad_norm=R, batch_size=B, groups=groups)
    assert relative_error(update, expected) <= TOLERANCE
    assert sorted(waits.early) == ([] if width == D else [2, 3])
    assert sorted(waits.early + waits.late) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_a_group_does_not_close_twice():
    names = [name for name, _ in Towers().named_parameters()]
    with pytest.raises(LogicalBatchError, match="a sample would count twice"):
        in_two_backwards([[*names[:4], *names[-2:]], names[4:6]])


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_a_forward_within_backward_counts_no_sample(place, backward):
    """It counts as a repetition, as of checkpointing; its own backward is refused."""
    model, x, ran = Blocks().double(), randn(B, T, D), []
    expected = of_layers(model, x)

    def again(_):
        if not ran:
            ran.append(place)
            with torch.enable_grad():
                value = ramp_loss(model(x))
            if backward:
                value.backward()

    def loss(output, *_):
        model.blocks[place].register_forward_hook(lambda module, args, output: output.register_hook(again) and None)
        return ramp_loss(model(x))

    def step():
        return private_step(model, (x,), loss, call=lambda x: None, clipping_style="layer-wise", **OPTIONS)

    if backward:
        with pytest.raises(DpshardError, match="differentiates each segment separately"):
            step()
    else:
        assert relative_error(step(), expected) <= TOLERANCE
    assert ran == [place]


class Branches(nn.Module):
    """Sum of branches, which all get one gradient tensor; autograd reaches `last` first."""

    def __init__(self, hook, width=D):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.hook = nn.Linear(width, D), nn.Linear(width, D), hook

    def forward(self, x):
        first = self.first(x)
        middle = x[:, :D].detach().requires_grad_().tanh()
        middle.register_hook(self.hook)
        return (first + middle + self.last(x)).tanh()


def written(hook, width=D):
    model = Branches(hook, width).double()
    options = {"clipping_style": "layer-wise", "max_grad_norm": 0.1, "verify": False}
    return private_step(model, (randn(2, width),), ramp_loss, **options)


def test_a_gradient_written_while_its_group_waits_is_refused(monkeypatch):
    assert norm(written(lambda g: g * 1000.0)) <= 0.1 * (1 + 1e-9)
    with pytest.raises(LogicalBatchError, match=r"last\.weight was used with was changed in place .* while it waited"):
        written(lambda g: g.mul_(1000.0))
    monkeypatch.setitem(scheme.WAITING, "cpu", 0)  # `last` closes before the hook runs
    assert norm(written(lambda g: g.mul_(1000.0))) <= 0.1 * (1 + 1e-9)


def test_a_gradient_written_while_its_complete_group_waits_is_refused(monkeypatch):
    """Of layers too large to wait as uses."""
    assert norm(written(lambda g: g.mul_(1000.0), 4096)) <= 0.1 * (1 + 1e-9)  # `last` closes before the hook runs
    monkeypatch.setitem(scheme.COMPLETE, "cpu", 2**30)
    assert norm(written(lambda g: g * 1000.0, 4096)) <= 0.1 * (1 + 1e-9)
    with pytest.raises(LogicalBatchError, match=r"last\.weight was used with was changed in place .* after its norm"):
        written(lambda g: g.mul_(1000.0), 4096)


# --- which groups share an anchor -------------------------------------------------------------------------------------


def anchors_of(devices, *, spanning=frozenset(), mode="bk", **options):
    """Return the parameters of each anchor, and the anchors with sums that wait for other ranks.

    Each group has one parameter of 32 bytes, on one of these devices; three of them may wait.
    """
    values = {str(i): torch.empty(4, dtype=torch.float64, device=device) for i, device in enumerate(devices)}
    roots = Roots({name: x.shape for name, x in values.items()}, values, values)
    groups = tuple(ClippingGroup(i, name, (name,), 1.0) for i, name in enumerate(values))
    sink = Found(roots)
    found = Scheme(roots, groups, AbadiClipping(), CLIPPING_MODES[mode], sink, spanning=spanning, **options)
    return ["".join(names) for names in found.anchors], found.withheld


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (["012", "345", "6"], {}),
        (["0123456"], {"at_once": True}),
        (["0", "1", "2", "3", "4", "5", "6"], {"mode": "ghost"}),
        (["01", "2", "345", "6"], {"spanning": frozenset({2})}),
        (["012", "3", "4", "56"], {"spanning": frozenset({3, 4})}),
    ],
)
def test_consecutive_groups_share_an_anchor(expected, arguments, monkeypatch):
    monkeypatch.setitem(scheme.WAITING, "cpu", 3 * 32)
    assert anchors_of(["cpu"] * 7, **arguments)[0] == expected


def test_groups_on_two_devices_share_no_anchor():
    assert anchors_of(["cpu", "cpu", "meta", "meta", "cpu"])[0] == ["01", "23", "4"]


def test_sums_that_wait_for_other_ranks_are_withheld():
    """By the number of their anchor, not of their group."""
    assert anchors_of(["cpu"] * 5, spanning=frozenset({3})) == (["012", "3", "4"], {1})


class Written(nn.Module):
    """Six small layers, which wait, and two wide ones; `two` has another group and another output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(6))
        self.written, self.wide = nn.Linear(D, 4096, bias=False), nn.Linear(D, 4096, bias=False)
        self.two = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))

    def forward(self, x):
        two, factor = self.two(x), randn(1, 2, 4096)
        narrow = sum((layer(x) * x).sum((1, 2)) for layer in self.small)
        wide = (self.wide(x) * factor).sum((1, 2))
        mid = torch.zeros(*x.shape[:-1], 4096, dtype=x.dtype, requires_grad=True).tanh()
        mid.register_hook(lambda gradient: gradient.mul_(1.0))  # writes the gradient of `written`, too
        written = ((mid + self.written(x)) * factor).sum((1, 2))
        return 1e4 * narrow + 100 * wide + 1e-6 * written, two


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:No gradient reached written.weight")
def test_a_group_whose_closing_failed_does_not_close_again():
    """Its stacked sums are there, clipped by the whole norm: another closing would give the rest a norm of its own."""
    model = Written().double()
    names = [name for name, _ in model.named_parameters()]
    groups = [[name for name in names if name.startswith("two") == other] for other in (False, True)]
    engine = noise_free_engine(model, batch_size=1, clipping_style=groups, **OPTIONS)
    one, two = model(randn(1, 2, D))
    with pytest.raises(LogicalBatchError, match="changed in place during backward, after its norm"):
        one.mean().backward()
    try:
        two.sum().backward()
        engine.privatize()
    except DpshardError:
        return
    assert norm({name: x for name, x in gradients_of(model).items() if name in groups[0]}) <= R / 2**0.5 * (1 + 1e-9)
