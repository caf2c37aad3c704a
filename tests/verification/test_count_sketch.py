"""Sketches of gradients: linear, nearly norm-preserving, and without side effects on the gradient."""

import pytest
import torch

from dpshard.verification.count_sketch import WIDTHS, Sketch


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["normal", "constant", "one element", "one column", "product"])
@pytest.mark.parametrize("columns", [4096, WIDTHS[0]])
def test_a_sketch_is_linear_and_nearly_keeps_norms(columns, kind):
    R, C = 300, columns  # more than is in float64 at a time
    x = {
        "normal": normal(R, C),
        "constant": torch.ones(R, C),
        "one element": torch.zeros(R, C).index_put((torch.tensor(290), torch.tensor(7)), torch.tensor(2.0)),
        "one column": torch.zeros(R, C).index_fill(1, torch.tensor(9), 1.0),
        "product": normal(R, 1) * normal(1, C, seed=2),
    }[kind]
    y = normal(R, C, seed=3)
    sketch, other, both = (Sketch.of(g) for g in (x, y, 2 * x - y))
    torch.testing.assert_close(sketch.norm, x.double().norm())
    torch.testing.assert_close(both.image, 2 * sketch.image - other.image, atol=1e-4, rtol=0)
    assert abs(float(sketch.image.norm() / x.norm()) - 1) < 5 * (2 / len(sketch.image)) ** 0.5 / 2


@pytest.mark.parametrize("n", [7, 2 * WIDTHS[0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sketch_leaves_the_gradient_as_it_is(dtype, n):
    """Autograd passes one tensor to two parameters, or one element expanded."""
    x = normal(n).to(dtype)
    before, sketch = x.clone(), Sketch.of(x)
    assert torch.equal(x, before)
    x.zero_()
    assert sketch.image.norm() > 0
    assert torch.allclose(Sketch.of(torch.ones((), dtype=dtype).expand(n)).norm ** 2, torch.tensor(float(n)).double())


def test_a_sketch_of_a_small_gradient_is_the_gradient():
    x = normal(1, WIDTHS[0])
    assert torch.equal(Sketch.of(x).image, x.flatten().double())
