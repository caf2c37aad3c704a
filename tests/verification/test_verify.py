"""Start-up verification: it catches what has no per-sample gradient, passes what has one, and changes nothing.

PITFALLS rows: 3 test_a_reduction_that_is_not_the_engines_is_caught; 7 test_a_lost_use_is_caught;
8 test_a_broken_rule_is_caught, test_a_broken_sum_of_a_large_parameter_is_caught;
12 test_batch_norm_in_training_mode_is_caught,
test_frozen_batch_norm_that_goes_back_to_training_is_refused, test_a_token_mean_loss_of_the_model_is_caught,
test_a_token_mean_loss_handed_in_is_caught, test_functions_that_mix_samples_are_caught,
test_samples_that_are_mixed_in_a_random_order_are_caught, test_detached_statistics_of_the_batch_are_caught,
test_a_small_balancing_loss_is_caught, test_a_memory_of_samples_is_caught,
test_a_second_loss_of_the_model_is_looked_at_too, test_padding_does_not_stand_in_for_samples.
"""

import copy
import random
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.clipping.tape import Tape
from dpshard.errors import BatchLayoutError, UnsupportedParameterError, VerificationError
from dpshard.records import OuterProduct
from dpshard.rules import RULES
from dpshard.verification.count_sketch import WIDTHS

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, T, D, V = 6, 5, 4, 7
REFUSED = (VerificationError, UnsupportedParameterError, BatchLayoutError)


def engine_on(model, **options):
    defaults = {"batch_size": B, "sample_size": 100, "steps": 50, "noise_multiplier": 0, "max_grad_norm": 0.5}
    engine = PrivacyEngine(model, **{**defaults, **options})
    engine._secret = bytes(range(32))
    return engine


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


class Between(nn.Module):
    """Two linear maps with a function of the hidden units [B, T, D] between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


# --- what it catches ------------------------------------------------------------------------------------------------


def functional_norm(h):
    return F.batch_norm(h, None, None, training=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 3)),
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.Linear(D, 3)),
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D).requires_grad_(False), nn.Linear(D, 3)),
        lambda: nn.Sequential(
            nn.Linear(D, D), nn.BatchNorm1d(D, affine=False, track_running_stats=False).eval(), nn.Linear(D, 3)
        ),
        lambda: Between(functional_norm),
    ],
    ids=["affine", "plain", "frozen", "without statistics", "functional"],
)
@pytest.mark.parametrize("shape", [(B, D), (B, D, D)], ids=["2d", "3d"])
def test_batch_norm_in_training_mode_is_caught(build, shape):
    model = build()
    engine_on(model)
    with pytest.raises(REFUSED, match=r"BatchNorm|batch_norm"):
        model(normal(*shape))


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_batch_norm_that_goes_back_to_training_is_refused(affine):
    """`model.train()` after an evaluation puts every layer into training mode, the frozen ones too."""
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=affine).requires_grad_(False), nn.Linear(D, 3))
    model[1].eval()
    engine = engine_on(model)
    model(normal(B, D)).sum(1).mean().backward()
    engine.privatize()
    model.zero_grad()
    model.eval()
    model.train()
    with pytest.raises(UnsupportedParameterError, match=r"1 \(BatchNorm1d\).*GroupNorm"):
        model(normal(B, D))


class LanguageModel(nn.Module):
    """Returns its loss; `reduce` makes it of the losses [B, T] and the mask [B, T] of what counts."""

    def __init__(self, reduce=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.reduce = reduce

    def forward(self, ids, labels=None):
        scores = self.head(self.embedding(ids).cumsum(1))
        if labels is None:
            return scores
        loss_BT = F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return {"loss": self.reduce(loss_BT, labels != -100), "scores": scores.detach()}


def token_mean(loss_BT, counts_BT):
    return loss_BT.sum() / counts_BT.sum()


def sample_mean(loss_BT, counts_BT):
    return (loss_BT.sum(1) / counts_BT.sum(1)).mean()


def sentences(lengths=(1, 3, 5, 2, 4, 5)):
    ids = torch.randint(0, V, (len(lengths), T), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for i, length in enumerate(lengths):
        labels[i, length:] = -100
    return ids, labels


def test_a_token_mean_loss_of_the_model_is_caught():
    model = LanguageModel(token_mean)
    engine_on(model)
    with pytest.raises(VerificationError, match=r"weight.*token-mean loss.*reduction"):
        model(*sentences())


def test_a_token_mean_loss_handed_in_is_caught():
    model = LanguageModel()
    engine = engine_on(model)
    ids, labels = sentences()

    def loss(reduce):
        def of(scores, labels):
            loss_BT = F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100, reduction="none")
            return reduce(loss_BT, labels != -100)

        return of

    engine.verify(ids, loss_fn=loss(sample_mean), targets=labels)
    with pytest.raises(VerificationError, match="token-mean loss"):
        engine.verify(ids, loss_fn=loss(token_mean), targets=(labels,))


@pytest.mark.parametrize("handed_in", [True, False])
@pytest.mark.parametrize(("reduction", "other"), [("mean", "sum"), ("sum", "mean")])
def test_a_reduction_that_is_not_the_engines_is_caught(reduction, other, handed_in):
    def reduce(loss_BT, counts_BT):
        return getattr(loss_BT.sum(1) / counts_BT.sum(1), other)()

    model = LanguageModel(reduce)
    engine = engine_on(model, loss_reduction=reduction)
    ids, labels = sentences()
    with pytest.raises(VerificationError, match="loss_reduction"):  # noqa: PT012
        if handed_in:
            engine.verify(ids, loss_fn=lambda s, y: getattr(s.square().sum((1, 2)), other)(), targets=labels)
        else:
            model(ids, labels)


class Retrieval(nn.Module):
    """Returns a contrastive loss: every other sample of the batch is a negative."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x, y):
        scores = self.left(x) @ self.right(y).T
        return F.cross_entropy(scores, torch.arange(len(x)))


def test_a_contrastive_loss_is_caught():
    model = Retrieval()
    engine_on(model)
    with pytest.raises(REFUSED, match=r"left|right"):
        model(normal(B, D), normal(B, D, seed=2))


def test_a_contrastive_loss_handed_in_is_caught():
    model = nn.Linear(D, 3)
    engine = engine_on(model)
    with pytest.raises(VerificationError, match="contrastive"):
        engine.verify(normal(B, D), loss_fn=lambda z: F.cross_entropy(z @ z.T, torch.arange(len(z))))


MIXERS = {
    "attention across samples": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "mean over samples": lambda h: h - h.mean(0),
    "softmax over samples": lambda h: h.softmax(0),
    "cumulative": lambda h: h.cumsum(0),
    "neighbour": lambda h: h + 0.1 * h.roll(1, 0),
    "maximum": lambda h: h / h.abs().max(),
    "sorted": lambda h: h.sort(0).values,
    "capacity": lambda h: h * (h.sum((1, 2)).argsort().argsort() < 2)[:, None, None],
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_functions_that_mix_samples_are_caught(mixer):
    model = Between(MIXERS[mixer])
    engine_on(model)
    with pytest.raises(REFUSED, match=r"first|second"):
        model(normal(B, T, D))


PERMUTED = {
    "list": lambda h: h[torch.randperm(len(h)).tolist()],
    "array": lambda h: h[torch.randperm(len(h)).numpy()],
    "gather": lambda h: h.gather(0, torch.randperm(len(h))[:, None].expand_as(h)),
    "embedding": lambda h: F.embedding(torch.randperm(len(h)), h),
    "order of draws": lambda h: h.gather(0, torch.rand(len(h)).argsort()[:, None].expand_as(h)),
    "matrix": lambda h: torch.eye(len(h))[torch.randperm(len(h)).tolist()] @ h,
}


@pytest.mark.parametrize("permuted", PERMUTED)
@pytest.mark.parametrize("last", [True, False])
def test_samples_that_are_mixed_in_a_random_order_are_caught(permuted, last):
    """Mixup within the model: random draws are constant in verification, but a permutation must not be the identity."""
    model = Between(lambda h: h + 0.3 * PERMUTED[permuted](h))
    if last:
        model.second = nn.Identity()
    engine_on(model)
    with pytest.raises(REFUSED, match=r"first|second"):
        model(normal(B, D))


@pytest.mark.parametrize(
    "output",
    [lambda h: h - h.detach().mean(0), lambda h: (h, h.detach().sum((1, 2)).softmax(0))],
    ids=["centred", "weights"],
)
def test_detached_statistics_of_the_batch_are_caught(output):
    """They have no gradient, but the script's loss has, and it reads them."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x):
            return output(self.layer(x))

    model = Detached()
    engine_on(model)
    with pytest.raises(VerificationError, match=r"when the inputs of other samples change.*detach"):
        model(normal(B, T, D))


class Experts(nn.Module):
    """Returns one loss of two: the larger is the sample's own, the other balances the experts of a batch."""

    def __init__(self, weight):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), nn.Linear(D, 3 * V)
        self.weight = weight

    def forward(self, x, y):
        share_BE = self.router(x).softmax(-1)
        scores_BV = (share_BE[:, :, None] * self.experts(x).unflatten(1, (3, V))).sum(1)
        return F.cross_entropy(scores_BV, y) + self.weight * 3 * share_BE.mean(0).square().sum()


@pytest.mark.parametrize("weight", [0.01, 0.001])
def test_a_small_balancing_loss_is_caught(weight):
    """A fault of less than a thousandth of the whole gradient; of the router's own it is more."""
    model = Experts(weight)
    engine_on(model)
    with pytest.raises(VerificationError, match=r"router.*load-balancing"):
        model(10 * normal(B, D), torch.arange(B))


class Bank(nn.Module):
    """Keeps what it has seen of the last samples, in a buffer, for the next ones to be compared with."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, D), nn.Linear(D, D)
        self.register_buffer("bank", torch.zeros(3, D))

    def forward(self, x):
        h = self.layer(x if x.is_floating_point() else self.embedding(x).cumsum(1)[:, -1])
        self.bank = torch.cat([self.bank, h.detach()])[-3:]
        return h - (h @ self.bank.T).softmax(-1) @ self.bank


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("ids", [True, False])
def test_a_memory_of_samples_is_caught(rows, ids):
    """Also with micro-batches of one row, of which none ever meets another."""
    model = Bank()
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match=r"bank: forward writes a function of the samples"):
        model(torch.arange(rows * T).view(rows, T) % V if ids else normal(rows, D))


class Balanced(nn.Module):
    """Returns its loss, and a load-balancing loss that it leaves to the script to add."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 3)

    def forward(self, x):
        scores = self.router(x)
        return scores.square().sum(1).mean(), scores.softmax(1).mean(0).square().sum()


def test_a_second_loss_of_the_model_is_looked_at_too():
    model = Balanced()
    engine_on(model)
    with pytest.raises(VerificationError, match="load-balancing"):
        model(normal(B, D))


@pytest.mark.parametrize("steps", [B, T])
def test_a_batch_dimension_that_is_not_the_first_is_caught(steps):
    """A model that reads [T, B, D]: its dimension 0 is taken for the samples, which meet along it."""
    model = Between(lambda h: h.cumsum(0))
    engine_on(model)
    with pytest.raises(REFUSED):
        model(normal(steps, B, D))


def test_rows_of_one_sample_in_the_batch_dimension_are_caught():
    """[B * T, D] rows, handed over as B * T samples, but attending to the others of their sentence."""
    model = Between(lambda h: h.unflatten(0, (-1, T)).cumsum(1).flatten(0, 1))
    engine_on(model)
    with pytest.raises(REFUSED):
        model(normal(B * T, D))


class Looped(nn.Module):
    """A layer that is used three times."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
def test_a_lost_use_is_caught(monkeypatch, mode):
    arrive, seen = Tape.arrive, []

    def lossy(self, use, tensors):
        seen.append(use.sources[0].label)
        lost = seen.count("layer.weight") % 3 == 2 and seen[-1] == "layer.weight"
        arrive(self, use, [None] * len(tensors) if lost else tensors)

    monkeypatch.setattr(Tape, "arrive", lossy)
    model = Looped()
    engine_on(model, clipping_mode=mode)
    with pytest.raises(VerificationError, match=r"layer\.(weight|bias)"):
        model(normal(B, D))


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
@pytest.mark.parametrize("fault", ["no cross terms", "norm", "sum", "rule"])
def test_a_broken_rule_is_caught(monkeypatch, fault, style):
    if fault == "no cross terms":
        monkeypatch.setattr(
            "dpshard.clipping.tape.measure",
            lambda records, *_, **__: (sum(r.norm_sq("ghost") for r in records), records),
        )
    elif fault == "norm":
        norm_sq = OuterProduct.norm_sq
        monkeypatch.setattr(OuterProduct, "norm_sq", lambda self, method: 0.9 * norm_sq(self, method))
    elif fault == "sum":
        clipped_sum = OuterProduct.clipped_sum
        monkeypatch.setattr(OuterProduct, "clipped_sum", lambda self, factor: clipped_sum(self, factor).roll(1, 0))
    else:
        linear = RULES[F.linear]
        monkeypatch.setitem(RULES, F.linear, lambda call, x, w, b: 1.1 * linear(call, x, w, b))
    model = Looped()
    engine_on(model, clipping_style=style, clipping_mode="bk")
    with pytest.raises(VerificationError, match=r"layer|head"):
        model(normal(B, D))


@pytest.mark.parametrize("fault", ["one element", "one row", "one sample"])
def test_a_broken_sum_of_a_large_parameter_is_caught(monkeypatch, fault):
    """Gradients of many elements are compared by their sketches."""
    clipped_sum = OuterProduct.clipped_sum

    def broken(self, factor):
        if fault == "one sample":
            return clipped_sum(self, factor * torch.tensor([1.0, 1.0, 0.99]))
        total = clipped_sum(self, factor).clone()
        spoiled = total[0, :1] if fault == "one element" else total[0]
        spoiled += 0.01 * total.norm() / len(spoiled) ** 0.5
        return total

    model = nn.Linear(90, 100)
    assert model.weight.numel() > 2 * WIDTHS[0]
    engine_on(model)
    x = normal(3, 90)
    model(x)  # as it is, it passes
    monkeypatch.setattr(OuterProduct, "clipped_sum", broken)
    model = nn.Linear(90, 100)
    engine_on(model)
    with pytest.raises(VerificationError, match="weight"):
        model(x)


class PositionsInDouble(nn.Module):
    """A sum whose two terms get one and the same gradient tensor, [B, 70, 64], from autograd."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64).double(), nn.Linear(64, 3).double()
        self.positions = nn.Parameter(normal(1, 70, 64).double())

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x) + self.positions))


class _NoGradientForTheSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


class NothingComes(nn.Module):
    """The graph gets to a parameter, and no gradient does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return _NoGradientForTheSecond.apply(self.first(x), self.second(x))


class Two(NamedTuple):
    scores: torch.Tensor
    twice: torch.Tensor


class OwnTuple(Two):
    """Cannot be made from its fields, one after the other."""

    def __new__(cls, scores):
        return super().__new__(cls, scores, 2 * scores)


class ReturnsOwnTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return OwnTuple(self.layer(x))


@pytest.mark.parametrize(
    ("model", "shape"), [(PositionsInDouble, (70, 64)), (NothingComes, (D,)), (ReturnsOwnTuple, (D,))]
)
def test_an_honest_model_that_is_hard_to_watch_passes(model, shape):
    model = model()
    engine = engine_on(model)
    engine.verify(normal(3, *shape).to(next(model.parameters()).dtype))


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
    """Whole gradients of three samples, and copies of them in float64, would be its peak."""
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
    """Counts the memory of tensors that functions have returned, and that are alive."""

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


# --- that it cannot be passed by ------------------------------------------------------------------------------------


@pytest.mark.parametrize("handed_in", [True, False])
def test_a_second_try_is_verified_again(handed_in):
    """A notebook cell that is run once more, a script that catches the error and goes on."""
    model = Between(MIXERS["mean over samples"])
    engine = engine_on(model)
    for _ in range(3):
        with pytest.raises(VerificationError):
            engine.verify(normal(B, T, D)) if handed_in else model(normal(B, T, D))
    with pytest.raises(VerificationError):
        model(normal(B, T, D))


def test_a_first_batch_of_one_row_does_not_pass_for_all():
    """One sample alone has nothing to be mixed with."""
    model = Between(MIXERS["mean over samples"])
    engine = engine_on(model)
    model(normal(1, T, D)).sum().backward()
    engine.privatize()
    model.zero_grad()
    with pytest.raises(VerificationError):
        model(normal(B, T, D))


def test_padding_does_not_stand_in_for_samples():
    """The first logical batch has one sample: padded with its copies, all sentences are of one length."""
    model = LanguageModel(token_mean)
    engine = engine_on(model, batch_size=1, sample_size=B)
    engine._secret = bytes([4]) * 32  # of 1, 0, 0, 1 and 2 samples are the first batches
    data = TensorDataset(*sentences())
    real = []
    with pytest.raises(VerificationError, match="token-mean loss"):  # noqa: PT012
        for logical_batch in engine.batches(data, 4):
            for ids, labels in logical_batch:
                real.append(int((~logical_batch.micro.plan.is_padding).sum()))
                model(ids, labels)["loss"].backward()
            engine.privatize()
            model.zero_grad()
    assert real[-1] >= 2
    assert all(n < 2 for n in real[:-1])
    assert len(real) > 1


# --- what it passes -------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Attention over T positions with a [T, T] table and a parameter per position: any of them could pass for B."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table, self.position = nn.Parameter(normal(T, T, seed=4)), nn.Parameter(normal(T, D, seed=5))

    def forward(self, x):
        q, k, v = self.qkv(x + self.position).chunk(3, -1)
        return self.out((q @ k.mT + self.table).softmax(-1) @ v)


class Structured(nn.Module):
    """Nested outputs, some of them in half as many rows, some without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x, mask=None, scale=None):
        h = self.first(x)
        return {"logits": self.second(h), "hidden": (h, [h.flatten(0, 1)]), "ids": h.argmax(-1), "none": None}


class StochasticDepth(nn.Module):
    """Drops its layer for some samples, or for all, by a random number of `draw`."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.layer, self.second = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.draw = draw

    def forward(self, x):
        x = self.first(x)
        return self.second(x + self.draw(self.layer, x))


def dropped(layer, x, drawn):
    return layer(x) * 2 if drawn < 0.5 else 0 * x


SOUND = {
    "mlp": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, 3), nn.AlphaDropout(0.2)),
    "dropout in place": lambda: Between(lambda h: torch.dropout_(h * 1, 0.5, True)),
    "attention dropout": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.3, batch_first=True),
    "noise": lambda: Between(lambda h: h + torch.randn_like(h) * torch.empty_like(h).uniform_()),
    "gumbel": lambda: Between(F.gumbel_softmax),
    "permuted channels": lambda: Between(lambda h: h[..., torch.randperm(D)]),
    "depth by rows": lambda: StochasticDepth(
        lambda layer, x: layer(x) * torch.empty(len(x), 1, 1).bernoulli_(0.5).div_(0.5)
    ),
    "depth by torch": lambda: StochasticDepth(lambda layer, x: dropped(layer, x, torch.rand([]))),
    "depth by python": lambda: StochasticDepth(lambda layer, x: dropped(layer, x, random.random())),
    "depth by numpy": lambda: StochasticDepth(lambda layer, x: dropped(layer, x, np.random.rand())),  # noqa: NPY002
    "positions": Positions,
    "structure": Structured,
    "looped": Looped,
    "group norm": lambda: nn.Sequential(nn.Linear(D, D), nn.GroupNorm(1, T), nn.Linear(D, 3)),
    "frozen statistics": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T).eval()),
    "idle parameter": lambda: Between(lambda h: h.detach()),
}


@pytest.mark.parametrize("rows", [B, T, 2, 1])
@pytest.mark.parametrize("name", SOUND)
def test_sound_models_pass(name, rows):
    """T rows, too: then the number of samples is that of positions, and tells nothing."""
    model = SOUND[name]()
    engine = engine_on(model)
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        engine.verify(normal(rows, T, D))
    leaves = [x for x in torch.utils._pytree.tree_leaves(model(normal(rows, T, D))) if x is not None]
    sum(x.sum() for x in leaves if x.requires_grad).backward()
    engine.privatize()
    assert engine.step == 1


@pytest.mark.parametrize("style", ["all-layer", "layer-wise", "block-wise", "param-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
@pytest.mark.parametrize("clipping_fn", ["automatic", "abadi", "global"])
def test_every_style_mode_and_function_passes(style, mode, clipping_fn):
    model = nn.Sequential(Positions(), nn.Linear(D, 3))
    engine = engine_on(model, clipping_style=style, clipping_mode=mode, clipping_fn=clipping_fn)
    engine.verify(normal(T, T, D))


def test_a_model_that_returns_its_loss_passes():
    model = LanguageModel(sample_mean)
    engine_on(model)
    model(*sentences())["loss"].backward()


def test_arguments_without_samples_pass():
    model = Structured()
    engine = engine_on(model)
    engine.verify(normal(B, T, D), mask=torch.ones(1, T), scale=torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_pass(dtype):
    for build in (Positions, Looped, SOUND["attention dropout"]):
        model = build().to(dtype)
        engine_on(model).verify(normal(T, T, D).to(dtype))


def test_a_model_that_enters_autocast_by_itself_passes():
    """accelerate wraps forward so; outside of it parameters and outputs are float32."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(D, D), nn.LayerNorm(D), nn.GELU())]
    model = nn.Sequential(nn.Linear(D, D), *layers, nn.Linear(D, 3))
    forward = model.forward

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float()

    model.forward = cast
    engine_on(model)
    model(normal(B, T, D)).sum(1).mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_passes_and_faults_are_caught_under_it(dtype):
    with torch.autocast("cpu", torch.bfloat16):
        for build in (Positions, Looped):
            engine_on(build().to(dtype)).verify(normal(T, T, D).to(dtype))
        with pytest.raises(VerificationError):
            engine_on(Between(MIXERS["mean over samples"]).to(dtype)).verify(normal(B, T, D).to(dtype))


# --- what it leaves alone -------------------------------------------------------------------------------------------


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
    # A tensor's object and version, so that also a change that was undone by hand would show as one.
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
    """Output, buffers and random numbers are those of a model that nobody has looked at."""
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
    model = Between(MIXERS["mean over samples"])
    engine_on(model, verify=False)
    model(normal(B, T, D)).sum().backward()


def test_a_model_without_differentiable_output_is_refused():
    model = Between(lambda h: h)
    model.second.requires_grad_(False)
    model.forward = lambda x: model.first(x).detach()
    engine_on(model)
    with pytest.raises(VerificationError, match=r"No output of the model.*requires_grad"):
        model(normal(B, T, D))


def test_an_output_that_is_not_by_sample_asks_for_the_loss():
    model = Between(lambda h: h)
    model.forward = lambda x: model.first(x).sum(1) @ model.first(x).sum(1).mT
    engine = engine_on(model)
    with pytest.raises(VerificationError, match=r"shape \(3, 3\) for 3 samples.*Hand the loss in: engine\.verify"):
        engine.verify(normal(B, T, D))


class Attention(nn.Module):
    """Queries and keys with biases; those of the keys shift all scores of a query alike, and change nothing."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_cancels_to_rounding_is_no_fault(dtype):
    engine_on(Attention().to(dtype), clipping_style="param-wise").verify(normal(B, T, D).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_gradient_is_looked_at_all_the_same(dtype):
    """A group whose gradient is 10^-4 of the whole mixes the samples."""
    model = nn.ModuleDict({"large": nn.Linear(D, 3), "small": nn.Linear(D, 3)}).to(dtype)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            small = model["small"](x)
            return model["large"](x) + 1e-4 * (small * small.detach().mean(0, keepdim=True).exp())

    with pytest.raises(VerificationError, match=r"small\.weight"):
        engine_on(Sum(), clipping_style="layer-wise").verify(normal(B, D).to(dtype))
