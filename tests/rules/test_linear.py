"""Linear maps of inputs of any rank, layout and kind, against the oracle.

Failure modes: 6 test_linear_of_any_rank (bias).
Batch dimensions that a shape does not tell (T = B, D = B, flattened, [T, B, D]): every `layouts` test.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import Use, assert_exact, private_step, randn

D, P = 4, 3

LAYOUTS = {
    "[B, T, D]": lambda f, x: f(x),
    "[T, B, D]": lambda f, x: f(x.transpose(0, 1)).transpose(0, 1),
    "[B * T, D]": lambda f, x: f(x.flatten(0, 1)).unflatten(0, (-1, x.shape[1])),
    "[T * B, D]": lambda f, x: f(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "[T, 1, B, D]": lambda f, x: f(x.transpose(0, 1).unsqueeze(1)).squeeze(1).transpose(0, 1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

MAPS = {
    "linear": lambda m, x: F.linear(x, m.w, m.b),
    "linear without bias": lambda m, x: F.linear(x, m.w) + m.b,
    "x @ w.t()": lambda m, x: x @ m.w.t() + m.b,
    "x @ w.T": lambda m, x: x @ m.w.T + m.b,
    "x @ w.mT": lambda m, x: torch.matmul(x, m.w.mT) + m.b,
    "x @ w.transpose": lambda m, x: torch.matmul(x, m.w.transpose(0, 1)) + m.b,
    "einsum": lambda m, x: torch.einsum("...d,pd->...p", x, m.w) + m.b,
    "tensordot": lambda m, x: torch.tensordot(x, m.w, dims=([x.dim() - 1], [1])) + m.b,
    "inner": lambda m, x: torch.inner(x, m.w) + m.b,
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 4), max_size=3), B=st.integers(1, 5), P=st.integers(1, 5), bias=st.booleans())
def test_linear_of_any_rank(shape, B, P, bias):
    model = Use(lambda m, x: m.layer(x), before=D, layer=torch.nn.Linear(D, P, bias=bias))
    assert_exact(model, randn(B, *shape, D))


@layouts
@pytest.mark.parametrize("linear_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("B", [3, D])
def test_layouts(layout, linear_map, B):
    model = Use(lambda m, x: layout(lambda y: linear_map(m, y), x), before=D, w=randn(P, D), b=randn(P))
    assert_exact(model, randn(B, D, D), modes=["auto", "bk"])


@pytest.mark.parametrize("weights", [1.0, 0.5])
def test_addmm_of_flattened_rows(weights):
    def conv1d(m, x):  # transformers' Conv1D
        return torch.addmm(m.b, x.view(-1, D), m.w, beta=weights, alpha=2 * weights).view(*x.shape[:-1], P)

    assert_exact(Use(conv1d, before=D, w=randn(D, P), b=randn(P)), randn(4, 4, D))


def test_addmm_as_a_method_and_with_other_places():
    assert_exact(Use(lambda m, x: m.b.addmm(x, m.w), before=D, w=randn(D, P), b=randn(P)), randn(4, D))
    assert_exact(Use(lambda m, x: torch.addmm(x, x, m.w), before=D, w=randn(D, D)), randn(4, D))
    assert_exact(Use(lambda m, x: torch.addmm(m.b, x, m.w), before=D, w=randn(D, P), b=randn(1, P)), randn(4, D))


@pytest.mark.parametrize(
    ("shape", "bias"), [((D,), ()), ((D,), (1,)), ((D,), (1, P)), ((4, D), (1,)), ((4, D), (4, P))]
)
def test_a_bias_that_broadcasts(shape, bias):
    assert_exact(
        Use(lambda m, x: F.linear(x, m.w, m.b), before=D, w=randn(P, D), b=randn(*bias)),
        randn(5, *shape),
        modes=["auto", "bk"],
    )


def test_a_bias_that_broadcasts_over_samples_in_the_weight():
    def loss(m, x):
        return F.linear(torch.ones(3, D, dtype=x.dtype, device=x.device), x, m.b).T

    assert_exact(Use(loss, before=D, b=randn(1)), randn(4, D), modes=["auto", "bk"])


def test_addmm_with_a_bias_for_all_outputs():
    assert_exact(
        Use(lambda m, x: torch.addmm(m.b, x, m.w), before=D, w=randn(D, P), b=randn(1)), randn(4, D), modes=["auto"]
    )


@pytest.mark.parametrize(
    ("shape", "weight", "product"),
    [
        ((D,), (D, P), lambda m, x: x.mm(m.w)),
        ((D,), (P, D), lambda m, x: torch.mm(m.w, x.t()).t()),
        ((D,), (D,), lambda m, x: x @ m.w),
        ((D,), (D,), lambda m, x: m.w @ x.t()),
        ((4, D), (D,), lambda m, x: x @ m.w),
        ((4, D), (4,), lambda m, x: m.w @ x),
        ((4, D), (P, 4), lambda m, x: m.w @ x),
        ((4, D), (4, 4), lambda m, x: torch.matmul(m.w, x)),
        ((2, 4, D), (2, D, P), lambda m, x: x @ m.w),
        ((2, 4, D), (2, P, 4), lambda m, x: m.w @ x),
        ((2, 4, D), (1, P, 4), lambda m, x: m.w.matmul(x)),
        ((4, D), (D, P), lambda m, x: x.__matmul__(m.w)),
        ((4, D), (D, P), lambda m, x: m.w.__rmatmul__(x)),
    ],
)
def test_matmul_with_the_parameter_on_either_side(shape, weight, product):
    assert_exact(Use(product, before=D, w=randn(*weight)), randn(4, *shape))


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(shape, bias):
    model = Use(lambda m, x: m.layer(x, x.sin()), before=D, layer=torch.nn.Bilinear(D, D, P, bias=bias))
    assert_exact(model, randn(4, *shape, D))


def test_bias_alone_keeps_no_activation():
    model = Use(lambda m, x: F.linear(x, m.w, m.b), before=D, w=randn(P, D), b=randn(P)).double()
    model.before.requires_grad_(False)
    model.w.requires_grad_(False)
    assert_exact(model, randn(4, 4, D))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        private_step(model, (randn(4, 4, D),), lambda out, *_: out.sum(), verify=False)
    assert saved == []
