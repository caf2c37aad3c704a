"""Verification passes models in which every sample has a gradient of its own."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import VerificationError
from tests.grids import all_pairs
from tests.oracle import clipped_mean, gradients_of, norm, per_sample_gradients, ramp_loss, relative_error
from tests.verification.models import (
    MIXERS,
    B,
    Between,
    D,
    LanguageModel,
    Looped,
    T,
    engine_on,
    normal,
    sample_mean,
    sentences,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]


def assert_passes(model, x, loss=ramp_loss, *, tolerance=1e-5, arguments=(), **options):
    """Assert that verification passes, and that the next step is the oracle's, with half of the samples clipped."""
    per_sample = per_sample_gradients(model, (x,), loss)
    engine = engine_for(model, per_sample, **options)
    engine.verify(x, **dict(arguments))
    loss(model(x, **dict(arguments))).backward()
    assert_exact_step(engine, model, per_sample, tolerance, options.get("clipping_fn", "abadi"))


def engine_for(model, per_sample, **options):
    norms = sorted(norm(gradients) for gradients in per_sample)
    options = {"clipping_fn": "abadi", "batch_size": len(norms), **options}
    return engine_on(model, max_grad_norm=norms[len(norms) // 2] * 0.999, **options)


def assert_exact_step(engine, model, per_sample, tolerance, clipping_fn="abadi"):
    engine.privatize()
    R, groups = engine.mechanism.max_grad_norm, engine.mechanism.clipping_groups
    expected = clipped_mean(
        per_sample, max_grad_norm=R, batch_size=len(per_sample), clipping_fn=clipping_fn, groups=groups
    )
    assert relative_error(gradients_of(model), expected) <= tolerance


class PositionsInDouble(nn.Module):
    """A sum; autograd gives both terms the same gradient tensor [B, 70, 64]."""

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
    """The graph reaches a parameter, but no gradient does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return _NoGradientForTheSecond.apply(self.first(x), self.second(x))


class Two(NamedTuple):
    scores: torch.Tensor
    twice: torch.Tensor


class OwnTuple(Two):
    """A tuple that cannot be built from its fields one by one."""

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
    x = normal(3, *shape).to(next(model.parameters()).dtype)
    assert_passes(model, x, lambda output: ramp_loss(output.scores if isinstance(output, OwnTuple) else output))


class Positions(nn.Module):
    """Attention over T positions with a [T, T] table and a parameter per position: any of them could be taken for B."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table, self.position = nn.Parameter(normal(T, T, seed=4)), nn.Parameter(normal(T, D, seed=5))

    def forward(self, x):
        q, k, v = self.qkv(x + self.position).chunk(3, -1)
        return self.out((q @ k.mT + self.table).softmax(-1) @ v)


class Structured(nn.Module):
    """Nested outputs; some have half as many rows, some no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x, mask=None, scale=None):
        h = self.first(x)
        return {"logits": self.second(h), "hidden": (h, [h.flatten(0, 1)]), "ids": h.argmax(-1), "none": None}


class StochasticDepth(nn.Module):
    """Drops its layer for some or all samples, by a random number from `draw`."""

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
@pytest.mark.filterwarnings("ignore:No gradient reached")
def test_sound_models_pass(name, rows):
    """Also with T rows: then the number of samples equals that of positions, and says nothing."""
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


@pytest.mark.parametrize(
    ("style", "mode", "clipping_fn"),
    all_pairs(
        ("all-layer", "layer-wise", "block-wise", "param-wise"),
        ("auto", "ghost", "per-example"),
        ("automatic", "abadi", "global"),
    ),
)
def test_every_style_mode_and_function_passes(style, mode, clipping_fn):
    model = nn.Sequential(Positions(), nn.Linear(D, 3))
    assert_passes(model, normal(T, T, D), clipping_style=style, clipping_mode=mode, clipping_fn=clipping_fn)


def test_a_model_that_returns_its_loss_passes():
    model, data = LanguageModel(sample_mean), sentences()

    def loss(scores, labels):
        loss_BT = F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return sample_mean(loss_BT, labels != -100)

    per_sample = per_sample_gradients(model, data, loss)
    engine = engine_for(model, per_sample)
    model(*data)["loss"].backward()
    assert_exact_step(engine, model, per_sample, 1e-5)


def test_arguments_without_samples_pass():
    arguments = {"mask": torch.ones(1, T), "scale": torch.tensor(2.0)}
    assert_passes(Structured(), normal(B, T, D), lambda output: ramp_loss(output["logits"]), arguments=arguments)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float64, 1e-10)])
def test_other_precisions_pass(dtype, tolerance):
    for build in (Positions, Looped):
        assert_passes(build().to(dtype), normal(T, T, D).to(dtype), tolerance=tolerance)
    engine_on(SOUND["attention dropout"]().to(dtype)).verify(normal(T, T, D).to(dtype))


def test_a_model_that_enters_autocast_by_itself_passes():
    """accelerate wraps forward in autocast; outside, parameters and outputs are float32."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(D, D), nn.LayerNorm(D), nn.GELU())]
    model = nn.Sequential(nn.Linear(D, D), *layers, nn.Linear(D, 3))
    forward = model.forward

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float()

    model.forward = cast
    assert_passes(model, normal(B, T, D), tolerance=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_passes_and_faults_are_caught_under_it(dtype):
    with torch.autocast("cpu", torch.bfloat16):
        for build in (Positions, Looped):
            engine_on(build().to(dtype)).verify(normal(T, T, D).to(dtype))
        with pytest.raises(VerificationError):
            engine_on(Between(MIXERS["mean over samples"]).to(dtype)).verify(normal(B, T, D).to(dtype))


class Attention(nn.Module):
    """Queries and keys with biases; those of the keys shift all scores of a query alike, so they change nothing."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_cancels_to_rounding_is_no_fault(dtype):
    assert_passes(Attention().to(dtype), normal(B, T, D).to(dtype), clipping_style="param-wise")
