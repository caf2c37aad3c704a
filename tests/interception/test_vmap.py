"""torch.vmap within a forward: over samples, positions or weights, nested, and of functions of parameters only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import BatchLayoutError, UnsupportedParameterError
from tests.oracle import Use, assert_exact, noise_free_engine, private_step, randn

B, T, D, P = 4, 3, 5, 4

USES = {
    "a layer, over samples": (lambda m, x: torch.vmap(m.map)(x), {"map": nn.Linear(D, P)}),
    "a network, over samples": (
        lambda m, x: torch.vmap(lambda t: m.last(m.norm(m.map(t).tanh())))(x),
        {"map": nn.Linear(D, P), "norm": nn.LayerNorm(P), "last": nn.Linear(P, 2)},
    ),
    "attention, over samples": (
        lambda m, x: torch.vmap(lambda t: m.attention(t, t, t, need_weights=False)[0])(x),
        {"attention": nn.MultiheadAttention(D, 1)},
    ),
    "a table, over samples": (
        lambda m, x: torch.vmap(lambda t: m.table((t * 3).long() % 4).sum(-2))(x),
        {"table": nn.Embedding(4, P)},
    ),
    "a convolution, over samples": (
        lambda m, x: torch.vmap(lambda t: F.conv1d(t[None], m.w)[0])(x),
        {"w": randn(2, T, 2)},
    ),
    "elementwise, over samples": (
        lambda m, x: torch.vmap(lambda t: t * m.w + m.b)(x),
        {"w": randn(D), "b": randn(T, D)},
    ),
    "over positions": (lambda m, x: torch.vmap(m.map, in_dims=1, out_dims=1)(x), {"map": nn.Linear(D, P)}),
    "over both": (lambda m, x: torch.vmap(torch.vmap(lambda t: m.w @ t))(x), {"w": randn(P, D)}),
    "over positions, then samples": (
        lambda m, x: torch.vmap(torch.vmap(lambda t: m.w @ t), in_dims=1, out_dims=1)(x),
        {"w": randn(P, D)},
    ),
    "over weights": (lambda m, x: torch.vmap(lambda w: x @ w.T, out_dims=1)(m.w), {"w": randn(2, P, D)}),
    "over weights that are arguments": (
        lambda m, x: torch.vmap(F.linear, in_dims=(None, 0, 0), out_dims=1)(x, m.w, m.b),
        {"w": randn(2, P, D), "b": randn(2, P)},
    ),
    "over positions and their weights": (
        lambda m, x: torch.vmap(lambda t, w: t @ w, in_dims=(1, 0), out_dims=1)(x, m.w),
        {"w": randn(T, D, P)},
    ),
    "a derived weight": (lambda m, x: torch.vmap(lambda t: t @ (1 + m.w.T).exp())(x), {"w": randn(P, D) / 5}),
    "derived weights": (
        lambda m, x: torch.vmap(lambda w: x @ (1 + w.T).exp(), out_dims=1)(m.w),
        {"w": randn(2, P, D) / 5},
    ),
    "shapes asked for": (
        lambda m, x: torch.vmap(lambda t: m.w[: t.shape[0]].sum(0) * t * len(m.w))(x),
        {"w": randn(P, D)},
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of attention without vmap's rule
@pytest.mark.parametrize(("use", "parts"), USES.values(), ids=USES)
def test_exact(use, parts):
    torch.manual_seed(0)
    assert_exact(Use(use, before=D, **parts), randn(B, T, D))


def test_as_many_positions_as_samples():
    assert_exact(Use(lambda m, x: torch.vmap(m.map, 1, 1)(x), before=D, map=nn.Linear(D, P)), randn(B, B, D))


def refused(use, error=UnsupportedParameterError, match=""):
    with pytest.raises(error, match=match):
        private_step(Use(use, w=randn(D, P)).double(), (randn(B, T, D),), max_grad_norm=1.0)


def test_derivatives_within_a_forward_are_refused():
    refused(
        lambda m, x: torch.func.grad(lambda t: (t @ m.w).sin().sum())(x),
        match=r"w in the model.*within torch\.func\.grad.*Write out the derivative",
    )


def test_a_model_within_vmap_is_refused():
    model = Use(lambda m, x: x @ m.w, w=randn(D, P)).double()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(BatchLayoutError, match=r"called within torch\.vmap.*whole micro-batch"):
        torch.vmap(model)(randn(B, T, D))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_vmap_in_a_compiled_region_is_refused():
    torch._dynamo.reset()
    model = Use(lambda m, x: torch.vmap(m.map)(x), map=nn.Linear(D, P)).double()
    model.compile(backend="aot_eager")
    with pytest.raises(UnsupportedParameterError, match=r"map.*torch\.vmap.*leave the code that calls"):
        private_step(model, (randn(B, T, D),), max_grad_norm=1.0)
