"""Verification catches what has no per-sample gradient: functions and losses that mix samples.

Failure modes: 3 test_a_reduction_that_is_not_the_engines_is_caught; 12 test_batch_norm_in_training_mode_is_caught,
test_frozen_batch_norm_that_goes_back_to_training_is_refused, test_a_token_mean_loss_of_the_model_is_caught,
test_a_token_mean_loss_handed_in_is_caught, test_functions_that_mix_samples_are_caught,
test_samples_that_are_mixed_in_a_random_order_are_caught, test_detached_statistics_of_the_batch_are_caught,
test_a_small_balancing_loss_is_caught, test_a_memory_of_samples_is_caught,
test_a_second_loss_of_the_model_is_looked_at_too, test_padding_does_not_stand_in_for_samples,
test_two_rows_in_an_order_that_their_values_decide_are_caught,
test_a_capacity_for_more_samples_than_the_first_forward_had_is_caught.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard.errors import ConfigurationError, UnsupportedParameterError, VerificationError
from tests.verification.models import (
    MIXERS,
    REFUSED,
    B,
    Between,
    D,
    LanguageModel,
    T,
    V,
    engine_on,
    normal,
    sample_mean,
    sentences,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]


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
    """After an evaluation, `model.train()` puts every layer into training mode, even frozen ones."""
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


def token_mean(loss_BT, counts_BT):
    return loss_BT.sum() / counts_BT.sum()


def test_a_token_mean_loss_of_the_model_is_caught():
    model = LanguageModel(token_mean)
    engine_on(model)
    with pytest.raises(VerificationError, match=r"weight.*token-mean.*reduction"):
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
    with pytest.raises(VerificationError, match="token-mean or load-balancing loss"):
        engine.verify(ids, loss_fn=loss(token_mean), targets=(labels,))


def weighted(scores, y):
    return F.cross_entropy(scores, y, weight=torch.tensor([1.0, 5.0, 25.0]))


def test_class_weights_are_caught_and_rows_on_which_they_do_not_show_are_told():
    engine, x = engine_on(nn.Linear(D, 3)), normal(B, D)
    with pytest.raises(VerificationError, match="Class weights do"):
        engine.verify(x, loss_fn=weighted, targets=torch.arange(B) % 3)
    with pytest.warns(UserWarning, match="All rows have the target 2"):
        engine.verify(x, loss_fn=weighted, targets=torch.full((B,), 2))
    with pytest.warns(UserWarning, match="One sample does not show"):
        engine.verify(x[:1], loss_fn=weighted, targets=torch.tensor([1]))


@pytest.mark.parametrize(
    "targets", [torch.zeros(B - 1).long(), torch.tensor(0), list(range(B))], ids=["7", "0-dim", "list"]
)
def test_targets_without_a_row_for_each_input_are_refused(targets):
    with pytest.raises(ConfigurationError, match=r"targets\[0\] has .*, but the inputs have \d rows"):
        engine_on(nn.Linear(D, 3)).verify(normal(B, D), loss_fn=F.cross_entropy, targets=targets)


@pytest.mark.parametrize("handed_in", [True, False])
@pytest.mark.parametrize(("reduction", "other"), [("mean", "sum"), ("sum", "mean")])
def test_a_reduction_that_is_not_the_engines_is_caught(reduction, other, handed_in):
    def reduce(loss_BT, counts_BT):
        return getattr(loss_BT.sum(1) / counts_BT.sum(1), other)()

    model = LanguageModel(reduce)
    engine = engine_on(model, loss_reduction=reduction)
    ids, labels = sentences()
    message = f"times too {'large' if other == 'sum' else 'small'}. .*loss_reduction='{other}'"
    with pytest.raises(VerificationError, match=message):  # noqa: PT012
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
    """They have no gradient, but the script's loss reads them, and has one."""

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
    """Returns one of two losses: the larger one is the sample's own, the other balances the experts of a batch."""

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
    """The fault is below a thousandth of the whole gradient, but more of the router's."""
    model = Experts(weight)
    engine_on(model)
    with pytest.raises(VerificationError, match=r"router.*load-balancing"):
        model(10 * normal(B, D), torch.arange(B))


class Bank(nn.Module):
    """Keeps the last samples in a buffer, to compare the next ones with them."""

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
    """Also with micro-batches of one row, where samples never meet."""
    model = Bank()
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match=r"bank: forward writes a function of the samples"):
        model(torch.arange(rows * T).view(rows, T) % V if ids else normal(rows, D))


class Balanced(nn.Module):
    """Returns its loss, and leaves a load-balancing loss for the script to add."""

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
    """A model that reads [T, B, D]: dimension 0 is taken for the samples, which meet along it."""
    model = Between(lambda h: h.cumsum(0))
    engine_on(model)
    with pytest.raises(REFUSED):
        model(normal(steps, B, D))


def test_rows_of_one_sample_in_the_batch_dimension_are_caught():
    """[B * T, D] rows, passed as B * T samples, attend to the rest of their sentence."""
    model = Between(lambda h: h.unflatten(0, (-1, T)).cumsum(1).flatten(0, 1))
    engine_on(model)
    with pytest.raises(REFUSED):
        model(normal(B * T, D))


@pytest.mark.parametrize("handed_in", [True, False])
def test_a_second_try_is_verified_again(handed_in):
    """A notebook cell runs again, or a script catches the error and continues."""
    model = Between(MIXERS["mean over samples"])
    engine = engine_on(model)
    for _ in range(3):
        with pytest.raises(VerificationError):
            engine.verify(normal(B, T, D)) if handed_in else model(normal(B, T, D))
    with pytest.raises(VerificationError):
        model(normal(B, T, D))


def test_a_first_batch_of_one_row_does_not_pass_for_all():
    """A single sample has nothing to mix with."""
    model = Between(MIXERS["mean over samples"])
    engine = engine_on(model)
    model(normal(1, T, D)).sum().backward()
    engine.privatize()
    model.zero_grad()
    with pytest.raises(VerificationError):
        model(normal(B, T, D))


def test_padding_does_not_stand_in_for_samples():
    """The first logical batch has one sample; with its copies as padding, all sentences have one length."""
    model = LanguageModel(token_mean)
    engine = engine_on(model, batch_size=1, sample_size=B)
    engine._secret = bytes([4]) * 32  # the first batches have 1, 0, 0, 1 and 2 samples
    data = TensorDataset(*sentences())
    real = []
    with pytest.raises(VerificationError, match="token-mean or load-balancing loss"):  # noqa: PT012
        for logical_batch in engine.batches(data, 4):
            for ids, labels in logical_batch:
                real.append(int((~logical_batch.micro.plan.is_padding).sum()))
                model(ids, labels)["loss"].backward()
            engine.privatize()
            model.zero_grad()
    assert real[-1] >= 2
    assert all(n < 2 for n in real[:-1])
    assert len(real) > 1


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
    with pytest.raises(VerificationError, match=r"shape \(3, 3\) for 3 samples.*Pass the loss: engine\.verify"):
        engine.verify(normal(B, T, D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_gradient_is_looked_at_all_the_same(dtype):
    """A group with 10^-4 of the whole gradient mixes the samples."""
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


def first_row_decides(h):
    return torch.where(h[:, :1] < h[:1, :1], 0.9 * h, h)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "function",
    [
        lambda h: h[h[:, 0].argsort()],
        lambda h: h[(h[:, 0] + 5).argsort(descending=True)],
        lambda h: h[F.layer_norm(h, (D,))[:, 0].argsort()],
        lambda h: torch.cat([h, h]).gather(0, h[:, 0].argsort()[:, None].expand_as(h)),
        first_row_decides,
        lambda h: h + (h[h[:, 0].argsort()] - h).detach(),
    ],
    ids=["ascending", "descending", "normalised", "gathered", "first row", "detached"],
)
def test_two_rows_in_an_order_that_their_values_decide_are_caught(function, seed):
    """Half of the pairs lie in this order already."""
    torch.manual_seed(seed)
    model = Between(function)
    model.second = nn.Identity()
    engine_on(model)
    with pytest.raises(REFUSED):
        model(normal(2, D, seed=seed))


def test_a_capacity_for_more_samples_than_the_first_forward_had_is_caught():
    model = Between(lambda h: h * (h[:, :1].argsort(0).argsort(0) < 2))
    engine_on(model)
    model(normal(2, D))
    with pytest.raises(REFUSED):
        model(normal(4, D))
