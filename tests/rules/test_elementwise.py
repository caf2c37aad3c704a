"""Elementwise functions with broadcasting, and parameters that are expanded along the samples, against the oracle.

Failure modes: 7 test_both_operands; 13 (no batch dimension) every test.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dpshard.errors import DpshardError, UnsupportedParameterError
from tests.oracle import Use, assert_exact, private_step, randn

T = D = 4


def positive(*shape):
    return torch.rand(shape, dtype=torch.float64) + 0.5


# name -> number of tensor arguments; each test puts the parameter at every place
FUNCTIONS = {
    **dict.fromkeys(("add", "sub", "rsub", "subtract", "mul", "multiply", "div", "divide", "true_divide"), 2),
    **dict.fromkeys(("pow", "float_power", "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "logaddexp"), 2),
    **dict.fromkeys(("xlogy", "copysign", "clamp_min", "clamp_max"), 2),
    **dict.fromkeys(("addcmul", "addcdiv", "lerp", "clamp"), 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_with_the_parameter_at_every_place(name):
    function = getattr(torch, name, None) or getattr(torch.Tensor, name)
    for place in range(FUNCTIONS[name]):

        def use(m, x, place=place):
            data = [x.square() + 0.5, x.sin().abs() + 0.1, x.cos().abs() + 0.2][: FUNCTIONS[name]]
            data[place] = m.w
            return function(*data)

        assert_exact(Use(use, before=D, w=positive(D)), randn(4, T, D), modes=["auto"])


OPERATORS = {
    "x + w": lambda x, w: x + w,
    "w + x": lambda x, w: w + x,
    "x - w": lambda x, w: x - w,
    "w - x": lambda x, w: w - x,
    "x * w": lambda x, w: x * w,
    "w * x": lambda x, w: w * x,
    "x / w": lambda x, w: x / w,
    "w / x": lambda x, w: w / (x.square() + 1),
    "x ** w": lambda x, w: (x.square() + 1) ** w,
    "w ** x": lambda x, w: w**x,
    "add alpha": lambda x, w: torch.add(x, w, alpha=2),
    "add other=": lambda x, w: torch.add(x, other=w),
    "where": lambda x, w: torch.where(x > 0, x, w),
    "where of two": lambda x, w: torch.where(x > 0, w, 2 * w),
    "where of fixed": lambda x, w: torch.where(torch.arange(T, device=x.device)[:, None] % 2 == 0, x, w),
    "lerp by w": lambda x, w: torch.lerp(x, x.sin(), w),
    "clamp max=": lambda x, w: x.clamp(max=w),
}
operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


@operators
@pytest.mark.parametrize("shape", [(), (1,), (D,), (1, 1, D), (T, D), (T, 1), (1, T, 1)], ids=str)
@pytest.mark.parametrize("B", [3, T])
def test_broadcasting(operator, shape, B):
    model = Use(lambda m, x: operator(x, m.w), before=D, w=positive(*shape))
    assert_exact(model, randn(B, T, D), modes=["auto"], verify=shape == (D,))  # the oracle checks more


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=3), B=st.integers(1, 4))
def test_any_shapes_that_broadcast(data, shape, B):
    kept = data.draw(st.integers(0, len(shape)))
    own = [size if data.draw(st.booleans()) else 1 for size in shape[kept:]]
    assert_exact(Use(lambda m, x: x * m.w + m.b, w=randn(*own), b=randn(*own)), randn(B, *shape), modes=["auto"])


def test_data_of_lower_rank():
    assert_exact(Use(lambda m, x: x[:, 0, :1] * m.w, before=D, w=randn(3)), randn(4, T, D))
    assert_exact(Use(lambda m, x: x[:, None] * m.w, before=D, w=randn(3, 1, D)), randn(4, T, D))
    assert_exact(Use(lambda m, x: x * m.w, w=randn()), randn(4))
    assert_exact(Use(lambda m, x: x[..., None, None] + m.w, w=randn(4, 1, 1)), randn(4, 4))


LAYOUTS = {
    "[T, B, D]": lambda f, x: f(x.transpose(0, 1)).transpose(0, 1),
    "[B * T, D]": lambda f, x: f(x.flatten(0, 1)).unflatten(0, (-1, x.shape[1])),
    "[T * B, D]": lambda f, x: f(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("B", [3, T])
def test_layouts(layout, B):
    assert_exact(Use(lambda m, x: layout(lambda y: y * m.w + m.b, x), before=D, w=randn(D), b=randn(1)), randn(B, T, D))


def test_a_parameter_along_the_other_leading_dimension():
    """[T, B, D] times [T, 1, D], with T = B."""
    assert_exact(
        Use(lambda m, x: (x.transpose(0, 1) * m.w).transpose(0, 1), before=D, w=randn(T, 1, D)), randn(T, T, D)
    )


IN_PLACE = {
    "add_": lambda y, m: y.add_(m.w),
    "sub_": lambda y, m: y.sub_(m.w),
    "mul_": lambda y, m: y.mul_(m.w),
    "div_": lambda y, m: y.div_(m.w),
    "addcmul_": lambda y, m: y.addcmul_(y.detach().sin(), m.w),
    "lerp_": lambda y, m: y.lerp_(m.w, 0.3),
    "masked_fill_": lambda y, m: y.masked_fill_(y.detach() > 0, m.w.sum()),
    "+=": lambda y, m: y.__iadd__(m.w),
    "-=": lambda y, m: y.__isub__(m.w),
    "*=": lambda y, m: y.__imul__(m.w),
    "/=": lambda y, m: y.__itruediv__(m.w),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_data_changed_in_place(change):
    def use(m, x):
        y = m.layer(x)  # changes the output of a rule
        change(y, m)
        return y

    assert_exact(Use(use, before=D, layer=torch.nn.Linear(D, D), w=positive(D)), randn(4, T, D))


def test_both_operands():
    assert_exact(Use(lambda m, x: torch.addcmul(x, m.w, m.w), before=D, w=randn(D)), randn(4, T, D))
    assert_exact(Use(lambda m, x: torch.addcmul(m.b, x, m.w, value=0.5), w=randn(D), b=randn(T, 1)), randn(4, T, D))
    assert_exact(Use(lambda m, x: x * m.w + m.w, before=D, w=randn(D)), randn(4, T, D))


def test_masked_fill():
    assert_exact(Use(lambda m, x: x.masked_fill(x > 0, m.w), before=D, w=randn()), randn(4, T, D))
    assert_exact(Use(lambda m, x: torch.masked_fill(x, x > 0, m.w), before=D, w=randn()), randn(4, T, D))
    refused = Use(lambda m, x: m.w.masked_fill(x > 0, 0.0), w=randn(D))
    with pytest.raises(UnsupportedParameterError, match=r"masked_fill.*use torch.where"):
        private_step(refused, (randn(4, T, D),))


def test_attention_with_a_learned_bias_and_learned_queries():
    attention = F.scaled_dot_product_attention
    assert_exact(Use(lambda m, x: attention(x, x, x, attn_mask=m.w), before=D, w=randn(2, T, T)), randn(4, 2, T, D))
    assert_exact(Use(lambda m, x: attention(m.w, x, x), before=D, w=randn(1, 3, D)), randn(4, T, D))
    assert_exact(Use(lambda m, x: attention(m.w.expand(len(x), -1, -1), x, x), before=D, w=randn(3, D)), randn(4, T, D))


COPIES = {
    "expand": (lambda w, B: w.expand(B, -1, -1), (1, 2, D)),
    "expand of a lower rank": (lambda w, B: w.expand(B, 2, D), (D,)),
    "expand a Size": (lambda w, B: w.expand(torch.Size([B, 2, D])), (1, 1, D)),
    "expand size=": (lambda w, B: w.expand(size=(B, 2, D)), (2, D)),
    "broadcast_to": (lambda w, B: torch.broadcast_to(w, (B, 2, D)), (2, D)),
    "Tensor.broadcast_to": (lambda w, B: w.broadcast_to(B, 2, D), (2, 1)),
    "repeat": (lambda w, B: w.repeat(B, 1, 1), (1, 2, D)),
    "repeat of a lower rank": (lambda w, B: w.repeat(B, 3, 1), (2, D)),
    "repeat repeats=": (lambda w, B: w.repeat(repeats=(B, 1, 1)), (2, D)),
    "repeat into rows": (lambda w, B: w.repeat(B, 1).view(B, 2, D), (2, D)),
    "tile": (lambda w, B: torch.tile(w, (B, 1, 1)), (1, 2, D)),
    "repeat_interleave": (lambda w, B: torch.repeat_interleave(w, B, dim=0), (1, 2, D)),
    "stack after expand": (lambda w, B: w.expand(B, D).unsqueeze(1), (D,)),
    "transposed": (lambda w, B: w.expand(2, B, D).transpose(0, 1), (2, 1, D)),
    "flattened": (lambda w, B: w.expand(B * 2, D).view(B, 2, D), (1, D)),
}


@pytest.mark.parametrize(("copy", "shape"), COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("B", [3, D])
def test_class_tokens(copy, shape, B):
    model = Use(lambda m, x: torch.cat([copy(m.w, len(x)), x], 1), before=D, w=randn(*shape))
    assert_exact(model, randn(B, T, D))


def test_expand_as_data():
    assert_exact(Use(lambda m, x: m.w.expand_as(x) * x, before=D, w=randn(1, D)), randn(4, T, D))


def test_a_parameter_with_a_dimension_of_samples_is_refused():
    """Row i of the parameter would belong to sample i."""
    model = Use(lambda m, x: x * m.w[: len(x)], w=randn(9, 1))
    with pytest.raises(DpshardError):
        private_step(model, (randn(4, D),))
