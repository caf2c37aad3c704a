"""chunked_cross_entropy: values and gradients against the loss of whole logits; private steps against the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpshard.errors import ConfigurationError, DataError, LogicalBatchError, UnsupportedParameterError
from dpshard.losses import chunked_cross_entropy, head, sample_losses
from dpshard.losses.head import head_of, positions_of, rho
from dpshard.records import HeadRecord, gram
from dpshard.rules import vocabulary as rule

from .oracle import (
    assert_exact,
    clipped_mean,
    noise_free_engine,
    per_sample_gradients,
    private_step,
    randn,
    relative_error,
)

V, D, T = 23, 6, 5

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")


class Model(nn.Module):
    """Ids and labels, [B, 2, T] -> losses of a small language model's positions, [B, T]."""

    def __init__(
        self,
        *,
        tied: bool = False,
        bias: bool = False,
        chunk: int | None = 7,
        twice: bool = False,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=bias)
        self.chunk, self.twice, self.cap = chunk, twice, cap
        if tied:
            self.head.weight = self.table.weight

    def forward(self, pairs: Tensor) -> Tensor:
        ids, labels = pairs.unbind(1)
        hidden = torch.tanh(self.body(self.table(ids))) * 3
        weight, bias = self.head.weight, self.head.bias
        loss = chunked_cross_entropy(
            hidden, weight, labels, bias=bias, chunk_size=self.chunk, per="token", softcap=self.cap
        )
        if self.twice:
            loss = loss + chunked_cross_entropy(hidden.flip(1), weight, labels, chunk_size=3, per="token")
        return loss


class Logits(Model):
    """The same model by whole logits."""

    def forward(self, pairs: Tensor) -> Tensor:
        ids, labels = pairs.unbind(1)
        logits = self.head(torch.tanh(self.body(self.table(ids))) * 3)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return F.cross_entropy(logits.mT, labels, reduction="none")


def pairs(B: int, T: int = T) -> Tensor:
    ids = torch.randint(0, V, (B, 2, T))
    ids[0, 1, 2:] = -100  # a short sample
    ids[1, 1, 0] = ids[1, 1, 1]  # equal labels
    return ids


@pytest.mark.parametrize("per", ["sample-mean", "sample-sum"])
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 100])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_plain_autograd_gives_the_loss_of_whole_logits(per, chunk_size, cap):
    torch.manual_seed(0)
    hidden, weight, bias = (x.requires_grad_() for x in (randn(4, T, D), randn(V, D), randn(V)))
    labels = pairs(4)[:, 1]
    seed_B = torch.rand(4, dtype=torch.float64)
    ours = chunked_cross_entropy(hidden, weight, labels, bias=bias, per=per, chunk_size=chunk_size, softcap=cap)
    logits = F.linear(hidden, weight, bias)
    theirs = sample_losses(logits if cap is None else cap * torch.tanh(logits / cap), labels, per=per)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mine, expected = (torch.autograd.grad((x * seed_B).sum(), (hidden, weight, bias)) for x in (ours, theirs))
    torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-13)


def test_mean_over_rows_and_rows_without_positions():
    hidden, weight, labels = randn(4, D), randn(V, D), torch.randint(0, V, (4,))
    expected = F.cross_entropy(hidden @ weight.T, labels)
    torch.testing.assert_close(chunked_cross_entropy(hidden, weight, labels, reduction="mean"), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"bias": True},
        {"tied": True, "twice": True},
        {"chunk": None},
        {"tied": True, "bias": True, "cap": 1.5},
        {"tied": True, "twice": True, "cap": 0.5, "chunk": None},
    ],
)
def test_a_private_step_is_the_oracles(options):
    torch.manual_seed(0)
    assert_exact(Model(**options), pairs(5))


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_oracle_itself_sees_whole_logits(cap):
    torch.manual_seed(0)
    chunked, whole = Model(tied=True, cap=cap).double(), Logits(tied=True, cap=cap).double()
    whole.load_state_dict(chunked.state_dict())
    data = [pairs(4)]
    for one, other in zip(per_sample_gradients(chunked, data), per_sample_gradients(whole, data), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("style", ["layer-wise", "param-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_other_clipping_styles(style, mode):
    torch.manual_seed(0)
    model, data = Model(tied=style == "layer-wise", bias=True).double(), [pairs(5)]
    names = [name for name, _ in model.named_parameters()]
    groups = [[n] for n in names]
    if style == "layer-wise":
        groups = [["table.weight"], ["body.weight", "body.bias"], ["head.bias"]]
    update = private_step(model, data, max_grad_norm=0.5, clipping_style=style, clipping_mode=mode)
    expected = clipped_mean(per_sample_gradients(model, data), max_grad_norm=0.5, batch_size=5, groups=groups)
    assert relative_error(update, expected) < 1e-10


def test_units_of_several_rows():
    torch.manual_seed(0)
    model, data = Model(tied=True).double(), pairs(6)
    units = [per_sample_gradients(model, [data[i : i + 3]]) for i in (0, 3)]
    means = [{name: sum(g[name] for g in unit) / 3 for name in unit[0]} for unit in units]
    expected = clipped_mean(means, max_grad_norm=0.1, batch_size=2)
    update = private_step(model, [data], max_grad_norm=0.1, rows_per_unit=3, batch_size=2)
    assert relative_error(update, expected) < 1e-10


def test_long_samples_take_the_norm_from_chunks_of_the_gradient():
    torch.manual_seed(0)
    assert_exact(Model(tied=True), pairs(3, T=5 * D), modes=("auto", "ghost"))


def test_a_frozen_head_still_gives_its_input_a_gradient():
    torch.manual_seed(0)
    model = Model(bias=True)
    model.head.requires_grad_(False)
    assert_exact(model, pairs(4), modes=("auto", "ghost"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_and_single(dtype):
    """Autocast rounds as it does with whole logits, and no more."""
    torch.manual_seed(0)
    data, errors = [pairs(6)], {}
    for kind in (Model, Logits):
        torch.manual_seed(1)
        model = kind(tied=True)

        def under_autocast(x: Tensor, model: nn.Module = model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                return model(x)

        expected = clipped_mean(per_sample_gradients(model, data), max_grad_norm=0.5, batch_size=6)
        update = private_step(model, data, max_grad_norm=0.5, call=under_autocast)
        errors[kind] = relative_error(update, expected)
    assert errors[Model] < (1.3 * errors[Logits] if dtype is torch.bfloat16 else 1e-5)


def test_bfloat16_parameters_train_to_the_threshold_and_no_further():
    torch.manual_seed(0)
    model, data = Model(tied=True).bfloat16(), [pairs(2)[:1]]
    update = private_step(model, data, max_grad_norm=1e-3)
    total = sum(float(g.double().square().sum()) for g in update.values()) ** 0.5
    assert 0.98e-3 < total <= 1.001e-3  # gradients of bfloat16 parameters are rounded at the end


def test_a_sample_without_a_finite_norm_counts_as_zero():
    torch.manual_seed(0)
    model, data = Model(bias=True).double(), pairs(5)
    with torch.no_grad():
        model.table.weight[V - 1] = torch.nan
        model.head.bias[0] = 800.0  # exp(800) is infinite
    data[:, 0].remainder_(V - 1)
    spoilt = data.clone()
    spoilt[2, 0, 0] = V - 1
    kept = clipped_mean(per_sample_gradients(model, [data[[0, 1, 3, 4]]]), max_grad_norm=0.1, batch_size=5)
    for mode in ("auto", "ghost"):
        update = private_step(model, [spoilt], max_grad_norm=0.1, verify=False, clipping_mode=mode)
        assert relative_error(update, kept) < 1e-10


@pytest.mark.parametrize(
    ("distance", "cap"), [(0.0, None), (30.0, None), (80.0, None), (1e4, None), (0.0, 0.5), (30.0, 3.0)]
)
def test_no_measured_norm_is_below_the_gradient_however_well_the_label_fits(distance, cap):
    """At `distance` = 80 the label's probability is 1 - 1e-35: softmax minus one-hot is zero in float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, T, D), torch.randn(V, D)
    labels = torch.randint(0, V, (2, T))
    hidden[1] = weight[labels[1]] * distance / weight[labels[1]].square().sum(-1, keepdim=True)
    head = head_of(hidden, weight, None, 5, cap)
    at = positions_of(head, hidden, labels, pull=False, gram=gram)
    scale = torch.rand(2, T) * torch.tensor([[1.0], [-1.0]])
    record = HeadRecord(hidden, labels, scale, head, at, weight.shape)
    true = record.outer().rows[:, 0].double().mT @ record.cols.double()
    norm = true.square().sum((1, 2)).sqrt()
    assert (record.norm_sq(None).sqrt() >= norm * (1 - 1e-5)).all()
    torch.testing.assert_close(record.norm_sq(None).sqrt().double(), norm, rtol=1e-4, atol=1e-17)
    logits = (hidden.double() @ weight.double().T).requires_grad_()
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    F.cross_entropy(capped.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    whole = torch.cat([rho(at, head, hidden, labels, c) for c in head.chunks()], 2) * at.missing[..., None]
    torch.testing.assert_close(whole.double(), logits.grad, rtol=2e-3 if distance > 1e3 else 1e-4, atol=1e-30)


@pytest.mark.parametrize("written", ["weight", "bias"])
def test_a_head_written_before_backward_raises(written):
    """A larger bias alone makes the sums exponentially larger than the norms of the forward."""
    model = Model(bias=True)
    noise_free_engine(model, batch_size=4, verify=False)
    loss = model(pairs(4)).mean()
    with torch.no_grad():
        getattr(model.head, written).mul_(2)
    with pytest.raises(LogicalBatchError, match="written between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("written", ["weight", "bias"])
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_head_written_past_autograd_raises(written, how):
    """No version tells of it; sums were 1e5 times their bound."""
    model = Model(bias=True)
    noise_free_engine(model, batch_size=4, verify=False)
    loss = model(pairs(4)).mean()
    p = getattr(model.head, written)
    if how == "data":
        p.data.view(-1)[:3].add_(9)
    else:
        p.detach().numpy()[:1] *= 2
    with pytest.raises(LogicalBatchError, match="written between forward and backward"):
        loss.backward()


def test_on_accelerators_samples_of_a_written_head_are_dropped(monkeypatch):
    """Where waiting for a comparison would stall the device."""
    plain = rule.unless_written
    monkeypatch.setattr(rule, "unless_written", lambda scale, same, *, wait: plain(scale, same, wait=False))
    model = Model()
    engine = noise_free_engine(model, batch_size=4, verify=False)
    loss, weight = model(pairs(4)).mean(), model.head.weight.data
    before = weight.clone()
    weight.view(-1)[:3].add_(9)
    loss.backward()
    weight.copy_(before)  # else the release refuses the step
    engine.privatize()
    assert engine.metrics()["nonfinite_samples"] == 4
    assert all(not p.grad.any() for p in model.parameters())


def test_a_head_outside_the_models_forward_is_refused():
    class Features(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.table(ids)) + 0 * self.head(self.body(self.table(ids))).sum((1, 2), keepdim=True)

    model = Features()
    noise_free_engine(model, batch_size=4, verify=False)
    ids, labels = pairs(4).unbind(1)
    with pytest.raises(UnsupportedParameterError, match=r"head\.weight"):
        chunked_cross_entropy(model(ids), model.head.weight, labels).mean().backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": torch.zeros(3, 2, dtype=torch.int64)}, "hidden has shape"),
        ({"weight": torch.zeros(V, D + 1)}, "weight has shape"),
        ({"weight": torch.zeros(0)}, "whole only in the forward"),
        ({"bias": torch.zeros(V + 1)}, "bias has shape"),
        ({"per": "batch"}, "per is 'batch'"),
        ({"reduction": "sum"}, "reduction is 'sum'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"softcap": 0.0}, r"softcap is 0\.0"),
    ],
)
def test_bad_arguments(change, reason):
    good = {"hidden": torch.zeros(3, T, D), "weight": torch.zeros(V, D), "labels": torch.zeros(3, T, dtype=torch.int64)}
    with pytest.raises(ConfigurationError, match=reason):
        chunked_cross_entropy(**(good | change))


@pytest.mark.parametrize("label", [-1, V])
@pytest.mark.parametrize("trains", [True, False])
def test_a_label_that_is_no_class_raises(label, trains):
    """-1 is the last row of a weight for an index, and no class in a product: the norm would be another one's."""
    model, data = Model(bias=True), pairs(4)
    data[2, 1, 3] = label
    if trains:
        noise_free_engine(model, batch_size=4, verify=False)
    with (
        pytest.raises(DataError, match=f"labels has {label}, and the weight has {V} classes"),
        torch.set_grad_enabled(trains),
    ):
        model(data)


def test_where_labels_are_not_read_one_that_is_no_class_is_nan(monkeypatch):
    """As on a GPU: its sample counts as zero."""
    monkeypatch.setattr(head, "_refuse_other_labels", lambda *_: None)
    torch.manual_seed(0)
    model, data = Model(bias=True).double(), pairs(4)
    data[2, 1, 3] = -1
    update = private_step(model, [data], max_grad_norm=0.1, batch_size=3, verify=False)
    expected = clipped_mean(per_sample_gradients(model, [data[[0, 1, 3]]]), max_grad_norm=0.1, batch_size=3)
    assert relative_error(update, expected) < 1e-10


def test_one_more_product_than_ordinary_training_and_no_logits():
    """FLOPs and memory of a head much larger than its body."""
    V, D, T, B = 8192, 64, 64, 2

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight = nn.Linear(D, D), nn.Parameter(torch.randn(V, D) / 8)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return chunked_cross_entropy(self.body(x), self.weight, labels, chunk_size=256)

    model, x, labels = Head(), torch.randn(B, T, D), torch.randint(0, V, (B, T))
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            found = result if isinstance(result, tuple) else (result,)
            # The digest of the sums reads them as int64.
            sizes.extend(x.numel() for x in found if isinstance(x, Tensor) and x.is_floating_point())
            return result

    engine = noise_free_engine(model, batch_size=B, verify=False)
    model(x, labels).mean().backward()  # finds the samples
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()
    with FlopCounterMode(display=False) as counter, Sizes():
        model(x, labels).mean().backward()
    product = 2 * B * T * V * D
    gram_matrix = 2 * B * T * T * V
    body = 4 * 2 * B * T * D * D + 6 * 2 * B * T * T * D
    assert 0 < counter.get_total_flops() - (4 * product + gram_matrix) < body
    logits = B * T * V
    assert max(sizes) == V * D < logits  # the gradient of the weight
    assert sorted(set(sizes))[-2] <= max(B * T * 256, 256 * D)
    engine.detach()
