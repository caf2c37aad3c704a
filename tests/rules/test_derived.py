"""Parameters that pass through functions of parameters alone before they meet the data, against the oracle.

Failure modes: 7 test_pieces_of_one_parameter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from dpshard.errors import DpshardError
from dpshard.records import PerSampleGrad
from dpshard.rules.call import Source
from dpshard.rules.derived import pull_back, pull_back_per_sample, transposes
from tests.oracle import Use, assert_exact, private_step, randn

T = D = 4
P = 3

LINEAR = {  # a weight [P, D] from parameters
    "view": (lambda m: m.w.view(P, D), {"w": (P * D,)}),
    "reshape, flatten": (lambda m: m.w.flatten().reshape(P, D), {"w": (D, P)}),
    "unflatten, squeeze": (lambda m: m.w.unflatten(1, (1, P, D)).squeeze(), {"w": (1, P * D)}),
    "t": (lambda m: m.w.t(), {"w": (D, P)}),
    "T": (lambda m: m.w.T, {"w": (D, P)}),
    "mT": (lambda m: m.w.mT, {"w": (D, P)}),
    "transpose": (lambda m: m.w.transpose(0, 1), {"w": (D, P)}),
    "transpose of negative dims": (lambda m: m.w.transpose(-1, -2), {"w": (D, P)}),
    "no transpose": (lambda m: m.w.transpose(1, 1), {"w": (P, D)}),
    "permute": (lambda m: m.w.permute(1, 0, 2).reshape(P, D), {"w": (2, P, 2)}),
    "contiguous": (lambda m: m.w.contiguous(), {"w": (P, D)}),
    "transposed, contiguous": (lambda m: m.w.t().contiguous(), {"w": (D, P)}),
    "to": (lambda m: m.w.to(torch.float64), {"w": (P, D)}),
    "double": (lambda m: m.w.double(), {"w": (P, D)}),
    "clone": (lambda m: m.w.clone(), {"w": (P, D)}),
    "slice": (lambda m: m.w[1:4], {"w": (5, D)}),
    "slice of columns": (lambda m: m.w[..., ::2], {"w": (P, 2 * D)}),
    "select": (lambda m: m.w[1], {"w": (2, P, D)}),
    "narrow": (lambda m: m.w.narrow(0, 1, P), {"w": (5, D)}),
    "chunk": (lambda m: m.w.chunk(2)[1], {"w": (2 * P, D)}),
    "split": (lambda m: torch.split(m.w, [2, P])[1], {"w": (5, D)}),
    "unbind": (lambda m: m.w.unbind(0)[1], {"w": (2, P, D)}),
    "iteration": (lambda m: list(m.w)[1], {"w": (2, P, D)}),
    "flip": (lambda m: m.w.flip(0), {"w": (P, D)}),
    "neg": (lambda m: -m.w, {"w": (P, D)}),
    "roll": (lambda m: m.w.roll(1, 0), {"w": (P, D)}),
    "rows twice, by list": (lambda m: m.w[[0, 0, 1]], {"w": (5, D)}),
    "rows twice, by tensor": (lambda m: m.w[torch.tensor([0, 0, 1], device=m.w.device)], {"w": (5, D)}),
    "rows twice, by index_select": (
        lambda m: m.w.index_select(0, torch.tensor([0, 0, 1], device=m.w.device)),
        {"w": (5, D)},
    ),
    "boolean mask": (lambda m: m.w[torch.tensor([True, False, True, True], device=m.w.device)], {"w": (4, D)}),
    "expand": (lambda m: m.w.expand(P, D), {"w": (1, D)}),
    "repeat": (lambda m: m.w.repeat(P, 1), {"w": (1, D)}),
    "pad": (lambda m: F.pad(m.w, (1, 1)), {"w": (P, D - 2)}),
    "tril": (lambda m: m.w.tril(), {"w": (P, D)}),
    "diagonal": (lambda m: torch.diag(m.w), {"w": (D,)}),
    "symmetric": (lambda m: m.w + m.w.T, {"w": (D, D)}),
    "cat": (lambda m: torch.cat([m.w, m.u]), {"w": (2, D), "u": (1, D)}),
    "cat with itself": (lambda m: torch.cat([m.w, m.w]), {"w": (2, D)}),
    "cat with zeros": (lambda m: torch.cat([m.w, torch.zeros_like(m.w)]), {"w": (2, D)}),
    "stack": (lambda m: torch.stack([m.w, m.u, m.w]), {"w": (D,), "u": (D,)}),
    "scaled": (lambda m: 0.5 * m.w, {"w": (P, D)}),
    "masked": (lambda m: m.w * torch.eye(P, D, dtype=m.w.dtype, device=m.w.device), {"w": (P, D)}),
    "normalised": (lambda m: F.normalize(m.w), {"w": (P, D)}),
    "standardised": (lambda m: (m.w - m.w.mean(1, True)) / m.w.std(1, keepdim=True), {"w": (P, D)}),
    "exp": (lambda m: m.w.exp(), {"w": (P, D)}),
    "softplus": (lambda m: F.softplus(m.w), {"w": (P, D)}),
    "softmax": (lambda m: m.w.softmax(1), {"w": (P, D)}),
    "LoRA merged": (lambda m: m.w + 2 * m.u @ m.v, {"w": (P, D), "u": (P, 2), "v": (2, D)}),
    "einsum of two": (lambda m: torch.einsum("pr,rd->pd", m.u, m.v), {"u": (P, 2), "v": (2, D)}),
    "chain": (lambda m: (1 + m.w[:, 1:].t()).exp().chunk(2)[0].float().double().contiguous(), {"w": (D, 2 * P + 1)}),
}


@pytest.mark.parametrize(("derive", "shapes"), LINEAR.values(), ids=LINEAR)
def test_weight_of_a_linear_map(derive, shapes):
    parameters = {name: randn(*shape) for name, shape in shapes.items()}
    model = Use(lambda m, x: F.linear(x, derive(m)), before=D, **parameters)
    tolerance = 1e-6 if "float" in str(derive.__code__.co_names) else 1e-10
    assert_exact(model, randn(4, T, D), tolerance=tolerance)
    product = Use(lambda m, x: x @ derive(m).T, before=D, **parameters)
    assert_exact(product, randn(4, T, D), tolerance=tolerance, modes=["auto"])


def pruned():
    layer = nn.Linear(D, P)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 0.2)
    prune.random_unstructured(layer, "bias", 0.5)
    return layer


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "build", [lambda: nn.utils.weight_norm(nn.Linear(D, P)), pruned], ids=["weight_norm", "pruned"]
)
@pytest.mark.parametrize("outermost", [True, False])
def test_a_weight_that_a_hook_computes(build, outermost):
    """The outermost module's hook runs before the forward is entered."""
    layer = build().double()
    assert_exact(layer if outermost else nn.Sequential(layer), randn(4, T, D))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: x * (1 + m.w),
        lambda m, x: x * m.w.exp(),
        lambda m, x: x * m.w[0] + m.w[1],  # scalars
        lambda m, x: x + m.w.sum(),
        lambda m, x: x * m.w.mean().exp().clamp(max=100),
        lambda m, x: F.layer_norm(x, (D,), 1 + m.w, m.w.sin()),
        lambda m, x: F.rms_norm(x, (D,), m.w.abs()),
        lambda m, x: torch.cat([(2 * m.w).expand(len(x), 1, -1), x], 1),
        lambda m, x: torch.einsum("btd,t->bd", x, m.w.softmax(0)),
        lambda m, x: x * m.w + m.w.detach() + m.w.data + m.w.new_ones(D) + torch.zeros_like(m.w),
        lambda m, x: x * m.w if m.w.sum() < 100 else x,
        lambda m, x: F.conv1d(x, m.w[:, None, None], groups=T),
    ],
)
def test_vectors(use):
    assert_exact(Use(use, before=D, w=randn(D)), randn(4, T, D))


def test_half_precision_casts():
    model = Use(lambda m, x: F.linear(x.float(), m.w.float()).double(), before=D, w=randn(P, D))
    assert_exact(model, randn(4, T, D), tolerance=1e-6)
    gemma = Use(lambda m, x: (x.float() * (1.0 + m.w.float())).type_as(x), before=D, w=randn(D))
    assert_exact(gemma, randn(4, T, D), tolerance=1e-6)


@pytest.mark.parametrize("cast", [lambda w, x: w.type_as(x), lambda w, x: w.to(x), lambda w, x: w.to(x.dtype)])
def test_cast_to_the_type_of_the_data(cast):
    assert_exact(Use(lambda m, x: x * cast(m.w, x), before=D, w=randn(D)), randn(4, T, D))


def test_pieces_of_one_parameter():
    def qkv(m, x):
        q, k, v = (F.linear(x, w, b) for w, b in zip(m.w.chunk(3), m.b.split(P), strict=True))
        return (q @ k.mT).softmax(-1) @ v

    assert_exact(Use(qkv, before=D, w=randn(3 * P, D), b=randn(3 * P)), randn(4, T, D))
    overlapping = Use(lambda m, x: F.linear(x, m.w[:2]).sin() + F.linear(x, m.w[1:]), before=D, w=randn(3, D))
    assert_exact(overlapping, randn(4, T, D))
    whole_too = Use(lambda m, x: F.linear(x, m.w) * F.linear(x, m.w.chunk(2)[0]).repeat(1, 1, 2), w=randn(4, D))
    assert_exact(whole_too, randn(4, T, D))


@pytest.mark.parametrize(
    "parametrize",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()) or layer,
    ],
)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(D, D), lambda: nn.Conv1d(T, T, 3)])
def test_parametrize(parametrize, layer):
    model = nn.Sequential(nn.Linear(D, D), parametrize(layer()))
    assert_exact(model, randn(4, T, D))


def test_spectral_norm():
    """Its power iteration changes buffers in forward, without gradients; with converged buffers runs agree."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D).double(), n_power_iterations=2000)
    layer(randn(4, D))  # which converges
    layer.parametrizations.weight[0].n_power_iterations = 1
    model = nn.Sequential(nn.Linear(D, D), layer)
    assert_exact(model, randn(4, T, D))


def test_cached_parametrization():
    def cached(m, x):
        with nn.utils.parametrize.cached():
            return m.layer(m.layer(x).sin())

    assert_exact(Use(cached, layer=nn.utils.parametrizations.weight_norm(nn.Linear(D, D))), randn(4, T, D))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2),
        lambda w: w.__imul__(2),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: F.dropout(w, inplace=True),
    ],
)
def test_a_derived_tensor_that_is_changed_in_place_is_refused(change):
    def use(m, x):
        w = m.w.clone()
        change(w)
        return x * w

    with pytest.raises(DpshardError, match=r"w"):
        private_step(Use(use, w=randn(D)), (randn(4, T, D),))


def test_a_parameter_written_into_a_buffer_is_refused():
    def use(m, x):
        scale = torch.ones_like(x[0, 0])
        scale[:2] = m.w
        return x * scale

    with pytest.raises(DpshardError, match=r"w"):
        private_step(Use(use, before=D, w=randn(2)).double(), (randn(4, T, D),))


def test_dropout_on_a_parameter_is_refused():
    """Its recompute would draw another mask."""
    with pytest.raises(DpshardError, match=r"w|course"):
        private_step(Use(lambda m, x: F.linear(x, F.dropout(m.w, 0.5)), w=randn(P, D)), (randn(4, T, D),))


def source(recompute, shape):
    return Source("f(w, u)", "f(w, u)", ("w", "u"), shape, recompute, isometric=False, exact=True)


def test_pull_back_is_the_vector_jacobian_product():
    values = {"w": randn(3, 2), "u": randn(2)}
    derived = source(lambda v: (v["w"] * v["u"]).exp(), (3, 2))
    g = randn(4, 3, 2)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    expected = [torch.autograd.grad(derived.recompute(leaves), list(leaves.values()), g[i]) for i in range(4)]
    per_sample = pull_back_per_sample(derived, PerSampleGrad(g), values)
    total = pull_back(derived, g.sum(0), values)
    for i, name in enumerate(values):
        torch.testing.assert_close(per_sample[name].gradient, torch.stack([e[i] for e in expected]))
        torch.testing.assert_close(total[name], sum(e[i] for e in expected))


def test_what_a_transpose_is():
    assert transposes("t", (None,), (2, 3))
    assert transposes("T", (None,), (2, 3))
    assert transposes("transpose", (None, 0, -1), (2, 3))
    assert not transposes("transpose", (None, 0, -2), (2, 3))
    assert not transposes("mT", (None,), (2, 3, 4))
    assert not transposes("reshape", (None, 3, 2), (2, 3))
