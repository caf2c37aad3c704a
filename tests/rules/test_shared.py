"""Parameters that are used several times, or not at all, against the oracle.

Failure modes: 7 every test but the last two; 9 test_a_parameter_that_was_not_used.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpshard.records import EmbeddingRecord, OuterProduct
from tests.oracle import Use, assert_exact, randn

T = D = 4
V = 7


def token_ids(B=4):
    ids = torch.randint(0, V, (B, T))
    ids[:, 1] = ids[:, 0]
    return ids


HEADS = {
    "F.linear": lambda m, h: F.linear(h, m.w),
    "h @ w.t()": lambda m, h: h @ m.w.t(),
    "h @ w.T": lambda m, h: torch.matmul(h, m.w.T),
    "h.flatten @ w.mT": lambda m, h: h.flatten(0, 1).mm(m.w.mT).unflatten(0, h.shape[:2]),
    "einsum": lambda m, h: torch.einsum("btd,vd->btv", h, m.w),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_tied_embedding_and_head(head, padding_idx):
    assert_exact(Use(lambda m, i: head(m, F.embedding(i, m.w, padding_idx).sin()), w=randn(V, D)), token_ids())


def test_the_cross_term_of_a_tied_head_needs_no_per_sample_table(monkeypatch):
    def forbidden(self):
        raise AssertionError("a [B, V, C] table was built")

    model = Use(lambda m, i: F.embedding(i, m.w).sin() @ m.w.t(), w=randn(V, D))
    monkeypatch.setattr(EmbeddingRecord, "per_sample", forbidden)
    monkeypatch.setattr(OuterProduct, "per_sample", forbidden)
    assert_exact(model, token_ids(), modes=["bk", "ghost"])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(times=st.integers(1, 4), B=st.integers(1, 4), bias=st.booleans())
def test_a_layer_in_a_loop(times, B, bias):
    def loop(m, x):
        for _ in range(times):
            x = x + m.layer(m.norm(x)).sin()
        return x

    assert_exact(Use(loop, layer=nn.Linear(D, D, bias=bias), norm=nn.LayerNorm(D)), randn(B, T, D))


@pytest.mark.parametrize(
    ("use", "shape"),
    [
        (lambda m, x: F.linear(x, m.w).sin() @ m.w, (D, D)),  # once transposed, once not
        (lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), (D, D)),
        (lambda m, x: F.linear(x, m.w) + torch.addmm(m.w[0], x.view(-1, D), m.w).view(x.shape), (D, D)),
        (lambda m, x: m.w @ (x @ m.w), (D, D)),
        (lambda m, x: x @ m.w + m.w, (D, D)),
        (lambda m, x: (x * m.w) @ m.w, (D,)),
        (lambda m, x: F.linear(x, m.w, m.w[0]), (D, D)),
        (lambda m, x: F.layer_norm(x, (D,), m.w, m.w) * m.w, (D,)),
        (lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1) @ m.w, (D, D)),
        (lambda m, x: F.conv1d(F.conv1d(x, m.w, padding=1).sin(), m.w, padding=1), (T, T, 3)),
        (lambda m, x: F.conv1d(x, m.w[:, :, None]) + F.linear(x.mT, m.w).mT, (T, T)),
        (lambda m, x: F.conv1d(x, m.w, groups=2) + F.conv1d(x[:, :2], m.w), (T, 2, 1)),
        (lambda m, x: F.conv_transpose1d(F.conv1d(x, m.w, groups=2), m.w, groups=2), (T, 2, 2)),
        (lambda m, x: F.bilinear(x, x.sin(), m.w) + x @ m.w[0], (D, D, D)),
        (lambda m, x: x * m.w.exp() + m.w, (D,)),
    ],
)
def test_two_functions_of_one_parameter(use, shape):
    assert_exact(Use(use, before=D, w=randn(*shape)), randn(4, T, D))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, i: F.embedding(i, m.w) + m.w[0],
        lambda m, i: F.embedding(i, m.w) + F.embedding(torch.arange(T, device=i.device), m.w),
        lambda m, i: F.embedding(i, m.w).sin() + F.embedding(i.flip(1), m.w, 0),
        lambda m, i: m.w[i] * F.embedding(i, m.w).sin() + m.w[i, :1],
        lambda m, i: F.embedding_bag(i, m.w)[:, None] + F.embedding(i, m.w),
    ],
)
def test_two_lookups_of_one_table(use):
    assert_exact(Use(use, w=randn(V, D)), token_ids())


def test_one_module_under_two_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(D, D)
            self.third = nn.Linear(D, D)
            self.third.weight = self.first.weight

        def forward(self, x):
            return self.third(self.second(self.first(x)).sin())

    assert_exact(Net(), randn(4, T, D))


def test_frozen_parts():
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    assert_exact(model, randn(4, T, D))


def test_a_parameter_that_was_not_used():
    assert_exact(Use(lambda m, x: x * m.w, w=randn(D), unused=randn(3)), randn(4, T, D))


def test_a_branch_that_backward_does_not_reach():
    model = Use(lambda m, x: (F.linear(x, m.u), F.linear(x, m.w).sin(), x * m.w[0])[2], w=randn(D, D), u=randn(3, D))
    assert_exact(model, randn(4, T, D))
