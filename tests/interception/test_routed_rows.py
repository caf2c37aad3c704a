"""Rows that the data picks, or sends to experts: exact where they can be followed, refused where they cannot.

Failure modes: 8 (a use that cannot be told apart by sample raises, and names parameter, function and what to do);
9 test_an_idle_expert_gets_noise; 12 test_a_balancing_loss_is_refused.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import BatchLayoutError, UnsupportedParameterError, VerificationError
from dpshard.interception.routing import Routing
from dpshard.rules import COMPOSITES
from tests.oracle import (
    MODES,
    TOLERANCE,
    Use,
    assert_exact,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    per_sample_gradients,
    private_step,
    ramp_loss,
    randn,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")

B, T, D, E = 4, 5, 3, 3


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def flat(x):
    return x.reshape(-1, x.shape[-1])


def chosen(x):
    """Kept positions [B, T]: about half, a different number per sample, always the first."""
    return (x[..., 0] > 0) | (torch.arange(x.shape[1]) == 0)


def expert_of(x):
    """The expert of each row [N], about equally many rows for each."""
    return (flat(x)[:, 0] * 7).floor().long() % E


def home(x, rows, values):
    """Add the rows to their original places, [B, T, ...]."""
    return (
        torch.zeros(flat(x).shape[0], values.shape[-1], dtype=x.dtype)
        .index_add_(0, rows, values)
        .view(*x.shape[:2], -1)
    )


# --- rows that are left out -------------------------------------------------------------------------------------------


def by_mask(m, x):
    mask = chosen(x)
    out = torch.zeros(*x.shape[:2], 4, dtype=x.dtype)
    out[mask.nonzero(as_tuple=True)] = m.map(x[mask]).tanh()
    return out


def by_numbers(m, x):
    rows = chosen(x).flatten().nonzero()[:, 0]
    return home(x, rows, m.map(flat(x)[rows]).tanh())


def by_select(m, x):
    rows = chosen(x).flatten().nonzero()[:, 0]
    return home(x, rows, F.silu(m.map(torch.index_select(flat(x), 0, rows))))


def by_scatter(m, x):
    rows = chosen(x).flatten().nonzero()[:, 0]
    values = m.map(flat(x)[rows]).tanh()
    out = torch.zeros(flat(x).shape[0], 4, dtype=x.dtype).scatter_add(0, rows[:, None].expand_as(values), values)
    return out.scatter_add_(0, rows[:, None].repeat(1, 4), values).view(*x.shape[:2], -1)


@pytest.mark.parametrize("use", [by_mask, by_numbers, by_select, by_scatter])
def test_rows_that_are_left_out(use):
    assert_exact(Use(use, before=D, map=nn.Linear(D, 4)), randn(B, T, D))


def test_as_many_rows_as_samples():
    """The shape suggests that row n is sample n."""

    def use(m, x):
        rows = x[:, 0].argsort()
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        return out.index_copy(0, rows, m.map(x[rows]))

    assert_exact(Use(use, before=D, map=nn.Linear(D, 4)), randn(6, D))


EACH = {
    "layer norm": (lambda m, y: m.norm(y), {"norm": nn.LayerNorm(D)}),
    "group norm": (lambda m, y: F.group_norm(y, 1, m.w, m.b), {"w": torch.rand(D), "b": torch.rand(D)}),
    "table": (lambda m, y: m.table((y * 3).long() % 4).flatten(1), {"table": nn.Embedding(4, 2)}),
    "convolution": (lambda m, y: m.conv(y[:, None]).flatten(1), {"conv": nn.Conv1d(1, 4, 2)}),
    "grouped convolution": (lambda m, y: m.conv(y.unsqueeze(2)).flatten(1), {"conv": nn.Conv1d(D, D, 1, groups=D)}),
    "prelu": (lambda m, y: F.prelu(y, m.w), {"w": torch.rand(1)}),
    "linear map of cubes": (lambda m, y: m.map(y[:, None]).flatten(1), {"map": nn.Linear(D, 4)}),
    "vector": (lambda m, y: F.linear(y, m.w)[:, None], {"w": torch.rand(D)}),
    "weight on positions": (lambda m, y: (y.unsqueeze(1) * m.w).flatten(1), {"w": torch.rand(4, 1)}),
}


@pytest.mark.parametrize(("each", "parts"), EACH.values(), ids=EACH)
def test_rows_go_through_whatever_treats_them_one_by_one(each, parts):
    def use(m, x):
        rows = chosen(x).flatten().nonzero()[:, 0].flip(0)
        return home(x, rows, each(m, flat(x)[rows]))

    assert_exact(Use(use, before=D, **parts), randn(B, T, D))


@pytest.mark.parametrize("labels", [[0, 3, 7, 12, 1, 19], [0] * 20 + [7] + [0] * 8 + [15]], ids=["mixed", "rare"])
@pytest.mark.parametrize("positions", [0, 2])
def test_adaptive_softmax(labels, positions):
    """Clusters pick their rows. One cluster has no sample in the probe, and is met later."""

    class Adaptive(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(D, 8)
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0, head_bias=True)

        def forward(self, x):
            h, y = self.map(x[..., :D]), x[..., D].long()
            return -self.softmax(flat(h), y.flatten()).output.view(len(x), -1)

    y = torch.tensor(labels, dtype=torch.float64)
    y = y[:, None].expand(-1, positions)[..., None] if positions else y[:, None]
    x = torch.cat([randn(*y.shape[:-1], D), y], -1)
    assert_exact(Adaptive(), x, modes=MODES if len(labels) < 10 else ["auto"])


# --- experts ----------------------------------------------------------------------------------------------------------


def looped(m, x):
    """Apply a matrix, a bias and a scale per expert, looked up one by one."""
    expert, out = expert_of(x), torch.zeros(flat(x).shape[0], 4, dtype=x.dtype)
    for e in expert.unique():
        (rows,) = torch.where(expert == e)
        picked = flat(x)[rows]
        y = F.linear(picked, m.w[e], m.b[e]) * m.s[e]
        out.index_add_(0, rows, y.tanh() * picked.norm(dim=-1, keepdim=True))
    return out.view(*x.shape[:2], -1)


def transposed(m, x):
    expert, out = expert_of(x), torch.zeros(flat(x).shape[0], 4, dtype=x.dtype)
    for e in range(E):
        rows = (expert == e).nonzero().squeeze(-1)
        y = flat(x)[rows] @ m.w[e].t() + m.b[e]
        out = out.index_add(0, rows, torch.cat([y[:, :2].relu(), y[..., 2:]], dim=-1))
    return out.view(*x.shape[:2], -1)


def grouped_mm(x, w, *, offs, bias=None, out_dtype=None):
    """F.grouped_mm in float64, for which torch has no kernel; rows beyond the last group are undefined."""
    out, start = torch.full((len(x), w.shape[2]), torch.nan, dtype=x.dtype), 0
    pieces = []
    for g, end in enumerate(offs.tolist()):
        pieces.append(x[start:end] @ w[g])
        start = end
    return torch.cat([*pieces, out[start:]])


class Kernel(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (grouped_mm if func in (F.grouped_mm, torch._grouped_mm) else func)(*args, **(kwargs or {}))


def sorted_by_expert(m, x):
    expert = expert_of(x)
    order = expert.argsort(stable=True)
    ends = F.one_hot(expert, E).sum(0).cumsum(0).int()
    y = F.grouped_mm(flat(x)[order], m.w.mT, offs=ends).tanh()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back].view(*x.shape[:2], -1)


def sorted_some_for_nobody(m, x):
    """The last expert is on another rank (expert parallelism): its rows meet no weight."""
    expert = expert_of(x)
    order = expert.argsort(stable=True)
    ends = F.one_hot(expert, E)[:, : E - 1].sum(0).cumsum(0).int()
    y = F.grouped_mm(flat(x)[order], m.w[: E - 1].mT, offs=ends)
    y = y.masked_fill((expert[order] == E - 1)[:, None], 0)
    back = order.argsort()
    return y[back].view(*x.shape[:2], -1)


@pytest.mark.parametrize("use", [looped, transposed, sorted_by_expert, sorted_some_for_nobody])
def test_experts(use):
    model = Use(use, before=D, w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4))
    if use is not looped:
        del model.s
    if use in (sorted_by_expert, sorted_some_for_nobody):
        del model.b
    with Kernel():
        assert_exact(model, randn(B, T, D))


def test_experts_that_every_sample_uses_twice():
    """One expert, the same layer twice: cross terms between all rows of a sample."""

    def use(m, x):
        return looped(m, torch.tanh(looped(m, x)[..., :D]))

    assert_exact(Use(use, before=D, w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4)), randn(B, T, D))


def test_an_expert_that_sees_all_rows():
    """A loop applies each active expert to all rows, and weights the outputs: nothing is routed."""

    def use(m, x):
        weight = F.one_hot(expert_of(x), E).to(x.dtype).view(*x.shape[:2], E)
        out = torch.zeros(*x.shape[:2], 4, dtype=x.dtype)
        for e in expert_of(x).unique():
            out += F.linear(x, m.w[e]) * weight[..., e, None]
        return out

    assert_exact(Use(use, before=D, w=randn(E, 4, D)), randn(B, T, D))


def test_experts_under_checkpointing():
    def use(m, x):
        return checkpoint(m.experts, x, use_reentrant=False)

    experts = Use(looped, w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4))
    assert_exact(Use(use, before=D, experts=experts), randn(B, T, D))


def test_frozen_experts_between_trainable_layers():
    def use(m, x):
        return m.after(looped(m, m.map(x)))

    model = Use(use, map=nn.Linear(D, D), after=nn.Linear(4, 2), w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4))
    for name in "wbs":
        getattr(model, name).requires_grad_(False)
    assert_exact(model, randn(B, T, D))


def test_an_idle_expert_gets_noise():
    model = Use(looped, w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4))
    x = randn(B, T, D)
    x[..., 0] = 0.01  # all rows to expert 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.w.detach().clone()
    engine = PrivacyEngine(model, batch_size=B, sample_size=100, steps=1, noise_multiplier=1.0)
    model(x).square().sum(2).mean(1).mean().backward()
    assert model.w.grad[1:].abs().max() == 0
    optimizer.step()
    moved = (model.w.detach() - before)[1:]
    assert 0.1 / B < moved.std() < 2 / B
    engine.detach()


def test_in_training_other_experts_than_in_the_probe():
    """The layout comes from a few samples; the next batch has experts and loads that they lack."""
    x = randn(B, T, D)
    x[..., 0] = 0.01
    model = Use(looped, w=randn(E, 4, D), b=randn(E, 4), s=randn(E, 4)).double()
    noise_free_engine(model, batch_size=2 * B, max_grad_norm=1e-3, clipping_fn="automatic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    y = randn(B, T, D)
    for part in (x, y):
        model(part).square().sum((1, 2)).mean().backward()
    optimizer.step()
    together = gradients_of(model)
    fresh = Use(looped, w=model.w.detach(), b=model.b.detach(), s=model.s.detach())
    options = {"max_grad_norm": 1e-3, "clipping_fn": "automatic", "batch_size": 2 * B}
    apart = [private_step(fresh, (part,), lambda o: o.square().sum((1, 2)).mean(), **options) for part in (x, y)]
    for name, g in together.items():
        torch.testing.assert_close(g, apart[0][name] + apart[1][name])


class Modules(nn.Module):
    """Each expert is a module, called only if it has rows."""

    def __init__(self):
        super().__init__()
        self.before, self.experts = nn.Linear(D, D), nn.ModuleList(nn.Linear(D, 4) for _ in range(8))

    def forward(self, x):
        expert, h = (x[:, 0].long()) % 8, self.before(x)
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        for e in expert.unique().tolist():
            rows = (expert == e).nonzero()[:, 0]
            picked = h[None, rows].reshape(-1, D)
            out.index_add_(0, rows, self.experts[e](picked).tanh())
        return out


def test_experts_that_no_row_of_the_probe_came_to():
    x = randn(24, D)
    x[:, 0] = torch.arange(24) // 3
    assert_exact(Modules(), x, modes=["auto", "ghost"])


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(use, x, error=UnsupportedParameterError, match="", before=True, **parts):
    model = Use(use, before=x.shape[-1] if before else 0, **(parts or {"map": nn.Linear(x.shape[-1], 4)})).double()
    engine = noise_free_engine(model, batch_size=len(x), verify=False)
    try:
        with pytest.raises(error, match=match):
            model(x)
    finally:
        engine.detach()


def test_rows_that_were_mixed():
    def use(m, x):
        return m.map(x[chosen(x)].cumsum(0)).sum() * torch.ones(len(x))

    refused(use, randn(B, T, D), match=r"map.*the sample of each row is unknown.*Keep all rows")


def test_elements_that_were_picked():
    def use(m, x):
        return m.map(x.masked_select(chosen(x)[..., None]).view(-1, D))

    refused(use, randn(B, T, D), match=r"map.*the sample of each row is unknown")


def test_rows_of_different_samples_beside_each_other():
    """Adding rows of different samples is refused even without verification."""

    def use(m, x):
        return m.map(x + x[x[:, 0].argsort()])

    x = randn(B, D)
    x[:, 0] = -torch.arange(B)  # not in their order
    refused(use, x, match=r"map.*the sample of each row is unknown", before=False)


def test_rows_that_do_not_come_home():
    def use(m, x):
        rows = chosen(x).flatten().nonzero()[:, 0]
        return m.after(home(x, rows.flip(0), m.map(flat(x)[rows])))

    refused(
        use,
        randn(B, T, D),
        match=r"after.*the sample of each row is unknown",
        map=nn.Linear(D, 4),
        after=nn.Linear(4, 2),
    )


@pytest.mark.parametrize("column", [0, 1])
def test_elements_that_are_scattered_to_other_samples(column):
    """Of each row one element, the first or another, goes to the next sample."""

    def use(m, x):
        rows = torch.arange(len(x) * T)
        values, home = m.map(flat(x)[rows]), rows[:, None].repeat(1, 4)
        home[:, column] = home[:, column].roll(T)
        return m.after(torch.zeros_like(values).scatter_add(0, home, values).view(-1, T, 4))

    parts = {"map": nn.Linear(D, 4), "after": nn.Linear(4, 2)}
    refused(use, randn(B, T, D), match=r"after.*the sample of each row is unknown", **parts)


def test_a_function_that_looks_beyond_a_row():
    def use(m, x):
        rows = x[chosen(x)]
        return torch.einsum("nd,md,dp->np", rows, rows, m.w)

    refused(use, randn(B, T, D), match=r"w in.*rows of its input.*not known to treat them one by one", w=randn(D, 4))


def test_rows_one_batch_apart():
    """Flattened [T, B, D]: the number of a row does not give its sample as usual."""

    def use(m, x):
        x = x.transpose(0, 1)
        rows = chosen(x).flatten().nonzero()[:, 0]
        return home(x, rows, m.map(flat(x)[rows]))

    refused(use, randn(B, T, D), error=BatchLayoutError, match=r"one batch apart")


def test_rows_that_stay_in_order_in_the_probe_alone():
    """The two or three samples of a probe are sorted already, the micro-batch is not: every forward follows rows."""

    def use(m, x):
        return m.map(x[x[:, 0].argsort()].cumsum(0))

    def before_is_the_identity(model):
        with torch.no_grad():
            model.before.weight.copy_(torch.eye(D))
            model.before.bias.zero_()

    x = randn(6, D)
    x[:, 0] = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.2, 0.1])
    model = Use(use, before=D, map=nn.Linear(D, 4)).double()
    before_is_the_identity(model)
    noise_free_engine(model, batch_size=6, verify=False)
    with pytest.raises(UnsupportedParameterError, match=r"map.*the sample of each row is unknown"):
        model(x)


def test_compiled_experts_are_refused():
    def use(m, x):
        return sorted_by_expert(m, x)

    model = Use(use, before=4, w=torch.randn(E, 4, 4))  # grouped_mm takes rows of 16 bytes
    compiled = torch.compile(model, backend="eager")
    noise_free_engine(compiled, batch_size=B, verify=False)
    with pytest.raises(UnsupportedParameterError, match=r"grouped_mm.*torch\.compile would fix their number"):
        compiled(torch.randn(B, T, 4))


def test_a_table_that_is_read_by_index_is_no_route():
    """The table has as many rows as would fit the batch, and is indexed by positions."""

    def use(m, x):
        positions = torch.arange(T - 1, -1, -1)
        table = torch.linspace(0, 1, 2 * B * D, dtype=x.dtype).view(2 * B, D)
        return m.map(x * (1 + table[positions]) + m.map2(table[positions]))

    assert_exact(Use(use, before=D, map=nn.Linear(D, 4), map2=nn.Linear(D, D)), randn(B, T, D))


def test_rows_picked_after_the_last_parameter_are_fine():
    def use(m, x):
        return m.map(x)[chosen(x)]

    model = Use(use, map=nn.Linear(D, 4)).double()
    noise_free_engine(model, batch_size=B, verify=False)
    model(randn(B, T, D)).sum().backward()
    assert model.map.weight.grad is not None


def test_a_balancing_loss_is_refused():
    """It divides by an expert's number of rows in the whole micro-batch, so samples have no gradients of their own."""

    class Balanced(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.map = nn.Linear(D, E), nn.Linear(D, 4)

        def forward(self, x):
            share = self.gate(flat(x)).softmax(-1)
            load = F.one_hot(share.argmax(-1), E).to(x.dtype).mean(0)
            return self.map(x).square().mean() + E * (load * share.mean(0)).sum()

    model = Balanced().double()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(VerificationError, match=r"load-balancing loss"):
        model(randn(B, T, D))


# --- packed sequences -------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A map and a recurrent layer on packed rows, then heads; the last feature of x [B, T, D + 1] is the length."""

    def __init__(self):
        super().__init__()
        self.map, self.rnn = nn.Linear(D, 3), nn.GRU(3, 2, batch_first=True, bidirectional=True)
        self.head, self.last, self.scale = nn.Linear(4, 2), nn.Linear(4, 2), nn.Parameter(randn(3))
        self.double()

    def forward(self, x):
        rows = packed(x)
        y, h = self.rnn(rows._replace(data=self.map(rows.data).tanh() * self.scale))
        y = self.head(padded(y, x.shape[1]))
        return torch.cat([y.flatten(1), self.last(torch.cat([h[-2], h[-1]], 1).tanh())], 1)


def sequences(*lengths, T=T):
    """Return data of these lengths, with padding values that do not matter."""
    sizes = torch.tensor(lengths, dtype=torch.float64)
    return torch.cat([randn(len(sizes), T, D), sizes[:, None, None].expand(-1, T, 1)], 2)


def packed(x):
    sizes = x[:, 0, D].ceil().long()  # never 0, even for the halved inputs of verification
    return pack_padded_sequence(x[..., :D], sizes, batch_first=True, enforce_sorted=False)


def padded(rows, length=T):
    return pad_packed_sequence(rows, batch_first=True, total_length=length)[0]


def grouped(names, style):
    """Parameter names of each clipping group."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layer_wise = [[name for name in names if name.rpartition(".")[0] == layer] for layer in layers]
    return {"all-layer": [list(names)], "layer-wise": layer_wise, "param-wise": [[name] for name in names]}[style]


@pytest.mark.parametrize("style", ["all-layer", "layer-wise", "param-wise"])
def test_packed_sequences_of_unequal_lengths(style):
    model, x = Packed(), sequences(2, 5, 1, 4)
    per_sample = per_sample_gradients(model, (x,))
    options = {"max_grad_norm": 1.0, "batch_size": B}
    expected = clipped_mean(per_sample, groups=grouped(list(per_sample[0]), style), **options)
    for mode in MODES:
        update = private_step(model, (x,), clipping_style=style, clipping_mode=mode, **options)
        assert relative_error(update, expected) <= TOLERANCE
    assert relative_error(update, clipped_mean(per_sample, max_grad_norm=1e9, batch_size=B)) > 0.01


def test_packed_sequences_that_a_checkpoint_repeats():
    def use(m, x):
        return m.after(checkpoint(m.inner, x, use_reentrant=False).tanh())

    assert_exact(Use(use, inner=Packed(), after=nn.Linear(2 * T + 2, 2)), sequences(2, 5, 1, 4))


def test_every_packed_batch_has_an_order_of_its_own():
    """The layout comes from the first batch; a later one may have as many rows of other samples, or another T."""
    model = Packed()
    oracle = copy.deepcopy(model)
    lengths = [(5, 5, 5, 5), (5, 4, 2, 1), (1, 3, 3, 5), (4, 1, 2, 5), (5, 1, 2, 4)]
    batches = [sequences(*sizes) for sizes in lengths] + [sequences(3, 7, 1, 6, T=7), sequences(1, 1, 1, 1, T=2)]
    engine = noise_free_engine(model, batch_size=B, steps=len(batches), max_grad_norm=0.5)
    for x in batches:
        expected = clipped_mean(per_sample_gradients(oracle, (x,)), max_grad_norm=0.5, batch_size=B)
        ramp_loss(model(x)).backward()
        engine.privatize()
        assert relative_error(gradients_of(model), expected) <= TOLERANCE
        model.zero_grad()


def test_packed_sequences_of_poisson_batches():
    """Several logical batches; the padding rows of a micro-batch are packed, too, and contribute nothing."""
    model, x = Packed(), sequences(2, 5, 1, 4, 3, 3, 5, 1, 2)
    oracle = copy.deepcopy(model)
    engine = noise_free_engine(model, batch_size=5, sample_size=len(x), max_grad_norm=0.5, steps=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes = []
    for logical_batch in engine.batches(TensorDataset(torch.arange(len(x)), x), micro_batch_size=4):
        drawn = []
        for rows, data in logical_batch:
            drawn += rows[~logical_batch.is_padding].tolist()
            ramp_loss(model(data)).backward()
        optimizer.step()
        sizes.append(len(drawn))
        if drawn:
            per_sample = per_sample_gradients(oracle, (x[drawn],))
            expected = clipped_mean(per_sample, max_grad_norm=0.5, batch_size=5)
            assert relative_error(gradients_of(model), expected) <= TOLERANCE
        optimizer.zero_grad()
    assert any(size % 4 for size in sizes)


def test_lengths_as_an_input_of_their_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(D, 2, batch_first=True).double()

        def forward(self, x, sizes):
            rows = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            y, (h, _) = self.rnn(rows)
            return torch.cat([padded(y).flatten(1), h[-1]], 1)

    model, x, sizes = Model(), randn(B, T, D), torch.tensor([2, 5, 1, 4])
    oracle = copy.deepcopy(model)
    per_sample = []
    for i in range(B):
        grads = torch.autograd.grad(ramp_loss(oracle(x[i : i + 1], sizes[i : i + 1])), list(oracle.parameters()))
        per_sample.append(dict(zip([name for name, _ in oracle.named_parameters()], grads, strict=True)))
    engine = noise_free_engine(model, batch_size=B, max_grad_norm=0.3)
    ramp_loss(model(x, sizes)).backward()
    engine.privatize()
    expected = clipped_mean(per_sample, max_grad_norm=0.3, batch_size=B)
    assert relative_error(gradients_of(model), expected) <= TOLERANCE


def test_dropout_between_packed_layers():
    """With the same draws and no clipping, the sum over all samples is that of plain autograd."""
    rnn = nn.LSTM(D, 2, 2, dropout=0.5, batch_first=True)
    model, x = Use(lambda m, x: padded(m.rnn(packed(x))[0]), rnn=rnn).double(), sequences(2, 5, 1, 4)

    class Composed(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return COMPOSITES.get(func, func)(*args, **(kwargs or {}))

    def call(x):
        torch.manual_seed(1)
        return model(x)

    update = private_step(model, (x,), call=call, max_grad_norm=1e9)
    with Composed():
        ramp_loss(call(x)).backward()
    assert relative_error(update, gradients_of(model)) <= TOLERANCE


@pytest.mark.parametrize("plant", ["flipped", "as if all were as long"])
def test_a_wrong_assignment_of_packed_rows_is_caught(plant, monkeypatch):
    """A planted fault assigns a row to the wrong sample."""
    pack = Routing._pack

    def planted(self, args, kwargs, data, batch_sizes):
        pack(self, args, kwargs, data, batch_sizes)
        known, rows = self.samples(data), torch.arange(len(data))
        self._put([data], known.flip(0) if plant == "flipped" else rows % self.batch_size)

    monkeypatch.setattr(Routing, "_pack", planted)

    def use(m, x):
        rows = packed(x)
        return padded(rows._replace(data=m.map(rows.data)))

    model = Use(use, map=nn.Linear(D, 4)).double()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(VerificationError, match=r"map"):
        model(sequences(2, 5, 1, 4))


@pytest.mark.parametrize("by", ["a list", "an array"])
def test_packed_sequences_sorted_by_what_is_no_tensor(by):
    def use(m, x):
        order = x[:, 0, D].argsort(descending=True).tolist()
        back = [order.index(i) for i in range(len(x))]
        order, back = (np.array(order), np.array(back)) if by == "an array" else (order, back)
        x = x[order]
        rows = pack_padded_sequence(x[..., :D], x[:, 0, D].long(), batch_first=True)
        return padded(rows._replace(data=m.map(rows.data)))[back]

    assert_exact(Use(use, map=nn.Linear(D, 4)), sequences(2, 5, 1, 4))


def test_packed_sequences_that_were_collected_one_by_one_are_refused():
    """The order of a list of samples is unknown, although the resulting shape looks right."""

    def use(m, x):
        order = x[:, 0, D].argsort(descending=True).tolist()
        samples = x.unbind(0)
        x = torch.stack([samples[i] for i in order]) * 1.0
        rows = pack_padded_sequence(x[..., :D], x[:, 0, D].long(), batch_first=True)
        return padded(rows._replace(data=m.map(rows.data)))

    refused(
        use, sequences(2, 5, 1, 4), match=r"map.*the sample of each row is unknown", before=False, map=nn.Linear(D, 4)
    )


def test_columns_that_were_not_put_in_order_again_are_refused():
    def use(m, x):
        rows = pack_padded_sequence(x[..., :D], x[:, 0, D].long(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(rows._replace(unsorted_indices=None, sorted_indices=None))
        return m.map(y).transpose(0, 1)

    rows = {"map": nn.Linear(D, 4)}
    refused(use, sequences(2, 5, 1, 4), match=r"map.*without restoring its order", before=False, **rows)


def test_packed_rows_in_another_order_than_they_are_padded_in_are_refused():
    def use(m, x):
        rows = packed(x)
        return m.map(padded(rows._replace(data=rows.data[torch.arange(len(rows.data)).flip(0)])))

    refused(
        use, sequences(2, 5, 1, 4), match=r"map.*the sample of each row is unknown", before=False, map=nn.Linear(D, 4)
    )


def test_packed_rows_that_met_each_other_are_refused():
    def use(m, x):
        rows = packed(x)
        return padded(rows._replace(data=m.map(rows.data.cumsum(0))))

    refused(
        use, sequences(2, 5, 1, 4), match=r"map.*the sample of each row is unknown", before=False, map=nn.Linear(D, 4)
    )


def test_packed_rows_of_samples_that_nobody_counted_are_refused():
    """A tensor with one row per position, in no order of samples: packing it starts no route."""

    def use(m, x):
        rows = x[..., :D].transpose(0, 1).reshape(-1, D)  # [T * B, D]
        steps = rows.cumsum(0).reshape(-1, 2, D)
        packed = pack_padded_sequence(steps.repeat(1, 1, 1), torch.full((2,), len(steps)))
        return m.map(packed.data).reshape(len(x), -1)

    refused(
        use,
        sequences(4, 4, 4, 4, T=4),
        match=r"map.*the sample of each row is unknown",
        before=False,
        map=nn.Linear(D, 4),
    )


def test_a_norm_of_packed_rows():
    def use(m, x):
        rows = packed(x)
        return padded(rows._replace(data=m.norm(rows.data)))

    assert_exact(Use(use, norm=nn.LayerNorm(D)), sequences(2, 5, 1, 4))


def test_rows_in_two_orders_are_refused():
    """Both are followed, but row n of one belongs to another sample than row n of the other."""

    def use(m, x):
        rows = chosen(x).flatten().nonzero()[:, 0]
        return torch.addcmul(flat(x)[rows], m.w, flat(x)[rows.flip(0)])

    refused(use, randn(B, T, D), match=r"its inputs hold rows of different samples side by side", w=randn(D))


def test_routed_rows_within_a_compiled_region_are_refused():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(D, 3).double()

        def forward(self, x):
            rows = (flat(x)[:, 0] > 0).nonzero()[:, 0]
            return home(x, rows, self.map(flat(x)[rows]))

    model = Routed()
    compiled = torch.compile(model, backend="aot_eager")
    noise_free_engine(compiled, batch_size=B, verify=False)
    with pytest.raises(UnsupportedParameterError, match=r"torch\.compile would fix their number, so leave it"):
        compiled(randn(B, T, D))


@pytest.mark.parametrize(("others", "known"), [((), True), ((slice(None),), True), ((0,), False), ((slice(2),), False)])
def test_a_permutation_of_rows_replaces_their_samples_only_if_it_writes_whole_rows(others, known):
    """Elements that are not written stay those of another sample."""
    routing = Routing(B, lambda x, dim, read: True)
    x, order, places = randn(B, D), torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 3, 0])
    base, values = x[order], x[order]
    for rows in (base, values):
        routing.follow(torch.Tensor.__getitem__, (x, order), {}, rows)
    source = values[(slice(None), *others)]
    routing._put([source], order)
    base[(places, *others)] = source
    routing.follow(torch.Tensor.__setitem__, (base, (places, *others), source), {}, None)
    assert routing.lost(base) == (not known)
    if known:
        assert torch.equal(base, x[routing.samples(base)])
