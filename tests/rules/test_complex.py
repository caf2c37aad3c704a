"""Complex parameters: the gradient of one is that of its real and imaginary parts, and each part gets its own noise.

Failure modes: 2 test_a_sample_counts_for_both_parts; 7 the uses through two derivations; 10 test_single_precision;
15 test_both_parts_get_independent_noise.
"""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.recipes import AdamBC
from dpshard.records import Convolution, EmbeddingRecord, OuterProduct, PerSampleGrad, RoutedProduct
from tests.oracle import Use, assert_exact, gradients_of, norm, private_step, ramp_loss, randn, relative_error

T, D, P = 3, 5, 4
FALSE_ALARM = 1e-7
"""Of each statistical test, if the secret were random; it is fixed."""


def cplx(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.complex128)


def parts(y):
    return torch.view_as_real(y.resolve_conj())


def fft(x):
    return torch.fft.fft(x)


USES = {
    "spectral filter": (lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.w, n=D), {"w": cplx(3)}),
    "of real pairs": (
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.w), n=D),
        {"w": randn(3, 2)},
    ),
    "of two parameters": (
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.complex(m.w, m.v), n=D),
        {"w": randn(3), "v": randn(3)},
    ),
    "long convolution": (
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, n=9) * torch.fft.rfft(m.w, n=9), n=9),
        {"w": randn(D)},
    ),
    "linear": (lambda m, x: parts(F.linear(fft(x), m.w, m.b)), {"w": cplx(P, D), "b": cplx(P)}),
    "addmm": (
        lambda m, x: parts(torch.addmm(m.b, fft(x).flatten(0, 1), m.w)).view(len(x), -1),
        {"w": cplx(D, P), "b": cplx(P)},
    ),
    "matmul": (lambda m, x: parts(fft(x) @ m.w), {"w": cplx(D, P)}),
    "transposed": (lambda m, x: parts(fft(x) @ m.w.T), {"w": cplx(P, D)}),
    "adjoint": (lambda m, x: parts(fft(x) @ m.w.mH), {"w": cplx(P, D)}),
    "conjugate": (lambda m, x: parts(fft(x) @ m.w.conj()), {"w": cplx(D, P)}),
    "a real parameter, cast": (lambda m, x: parts(fft(x) @ m.w.to(torch.complex128)), {"w": randn(D, P)}),
    "real part": (lambda m, x: x @ m.w.real, {"w": cplx(D, P)}),
    "one of both parts": (lambda m, x: x @ torch.view_as_real(m.w)[..., 1], {"w": cplx(D, P)}),
    "absolute value": (lambda m, x: x @ m.w.abs(), {"w": cplx(D, P)}),
    "twice": (lambda m, x: parts(fft(x) @ m.w @ m.w.mH), {"w": cplx(D, P)}),
    "twice, of two kinds": (lambda m, x: parts((fft(x) * m.w[:, 0]) @ m.w), {"w": cplx(D, P)}),
    "in two slices": (
        lambda m, x: torch.cat(
            [torch.einsum("btd,dp->btp", fft(x)[..., s], m.w[s]) for s in (slice(2), slice(2, D))], -1
        ).abs(),
        {"w": cplx(D, P)},
    ),
    "einsum": (lambda m, x: torch.einsum("btd,dp->btp", fft(x), m.w).real, {"w": cplx(D, P)}),
    "convolution": (lambda m, x: parts(F.conv1d(fft(x).mT, m.w, m.b)), {"w": cplx(P, D, 2), "b": cplx(P)}),
    "grouped": (lambda m, x: parts(F.conv1d(fft(x), m.w, groups=T)), {"w": cplx(T, 1, 2)}),
    "transposed convolution": (lambda m, x: parts(F.conv_transpose1d(fft(x).mT, m.w)), {"w": cplx(D, P, 2)}),
    "table": (lambda m, x: parts(m.w[(x * 3).long() % 4] * fft(x)[..., None]), {"w": cplx(4, 2)}),
    "token": (lambda m, x: torch.cat([fft(x), m.w.expand(len(x), -1, -1)], 1).abs(), {"w": cplx(1, 2, D)}),
    "power": (lambda m, x: (fft(x) ** m.w).abs(), {"w": cplx(D, scale=0.1)}),
}


@pytest.mark.parametrize(("use", "parameters"), USES.values(), ids=USES)
def test_exact(use, parameters):
    assert_exact(Use(use, before=D, **parameters), randn(4, T, D))


def routed(m, x):
    rows = (x[..., 0] > 0).flatten().nonzero()[:, 0]
    flat = torch.fft.fft(x).flatten(0, 1)
    return parts(flat.new_zeros(len(flat), P).index_add(0, rows, F.linear(flat[rows], m.w, m.b)))


def test_rows_that_the_data_picks():
    use = lambda m, x: routed(m, x).view(len(x), -1)  # noqa: E731
    assert_exact(Use(use, before=D, w=cplx(P, D), b=cplx(P)), randn(6, T, D))


@pytest.mark.parametrize("style", ["layer-wise", "block-wise", "param-wise"])
def test_every_style(style):
    use = lambda m, x: parts(F.linear(fft(x), m.w, m.b))  # noqa: E731
    model, x = Use(use, before=D, w=cplx(P, D), b=cplx(P)).double(), randn(4, T, D)
    whole = private_step(model, (x,), clipping_style=style, max_grad_norm=1e9)
    assert relative_error(whole, private_step(model, (x,), max_grad_norm=1e9)) < 1e-12
    clipped = private_step(model, (x,), clipping_style=style, max_grad_norm=0.1, clipping_mode="bk")
    assert 0 < norm(clipped) <= 0.1


def test_a_sample_counts_for_both_parts():
    """A factor from the real parts only would let this sample through."""
    model = Use(lambda m, x: (x * (m.w * 1j)).real, w=cplx(D))
    assert norm(private_step(model, (randn(1, T, D),), max_grad_norm=1e-3)) == pytest.approx(1e-3)


def test_single_precision():
    double = Use(lambda m, x: parts(F.linear(fft(x), m.w)), before=D, w=cplx(P, D)).double()
    single = copy.deepcopy(double).float()
    single.w = nn.Parameter(double.w.detach().to(torch.complex64))
    x = randn(4, T, D)
    update = private_step(single, (x.float(),), max_grad_norm=1.0)
    assert update["w"].dtype == torch.complex64
    assert relative_error(update, private_step(double, (x,), max_grad_norm=1.0)) < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled():
    torch._dynamo.reset()
    model = Use(lambda m, x: parts(F.linear(fft(x), m.w) * m.s), before=D, w=cplx(P, D), s=cplx(P)).double()
    x = randn(4, T, D)
    expected = private_step(model, (x,), max_grad_norm=1.0)
    compiled = torch.compile(model, backend="aot_eager")
    assert relative_error(private_step(compiled, (x,), max_grad_norm=1.0), expected) < 1e-10


def test_a_complex_output():
    model = Use(lambda m, x: fft(x) @ m.w, before=D, w=cplx(D, P))
    assert_exact(model, (randn(4, T, D),), lambda output, *_: ramp_loss(parts(output)), modes=["auto"])


def test_bias_corrected_adam_moves_the_parts():
    moved = []
    for paired in (False, True):
        value = torch.linspace(0, 1, 6, dtype=torch.float64).view(3, 2)
        p = nn.Parameter(value.clone() if paired else torch.view_as_complex(value.clone()))
        optimizer = AdamBC([p], lr=0.1, noise_std=lambda: 0.1, weight_decay=0.1)
        for _ in range(3):
            p.grad = p.detach() + 1
            if paired:
                p.grad[:, 1] -= 1  # 1 is real
            optimizer.step()
        moved.append(p.detach() if paired else torch.view_as_real(p.detach()))
    torch.testing.assert_close(*moved)


RECORDS = {
    "outer product": OuterProduct(cplx(4, 2, 3, P), cplx(4, 2, 3, D), torch.Size((2, P, D))),
    "gather": EmbeddingRecord(torch.tensor([[0, 2, -1]] * 4), cplx(4, 3, P), torch.Size((3, P))),
    "per sample": PerSampleGrad(cplx(4, P, D)),
    "convolution": Convolution(cplx(4, 1, 2, 6), cplx(4, 1, 3, 5), torch.Size((3, 2, 2)), (1,), (0,), (1,), 1).outer(),
    "routed": RoutedProduct(
        cplx(6, P),
        cplx(6, D),
        torch.tensor([0, 1, 3, 3, 0, 1]),
        torch.tensor([0, 1, 1, 1, 0, 2]),
        4,
        torch.Size((2, P, D)),
    ),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_of_the_parts_is_the_same_gradient(record):
    whole = record.without(torch.zeros(4, dtype=torch.bool)).per_sample()
    assert torch.allclose(torch.view_as_complex(record.real().per_sample().contiguous()), whole)
    assert record.real().real().per_sample().shape == (*whole.shape, 2)


def noisy(model, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This loop feeds its own batches")
        engine = PrivacyEngine(model, batch_size=8, sample_size=64, steps=3, noise_multiplier=0.7, **options)
        engine._secret = engine._nonce = bytes(range(32))
        (model(torch.zeros(8, 300)) * 0).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    return gradients_of(model)["w"]


@pytest.mark.parametrize("noise", ["gaussian", "discrete-gaussian"])
def test_both_parts_get_independent_noise(noise):
    accountant = "rdp" if noise == "discrete-gaussian" else "pld"
    model = Use(lambda m, x: parts(fft(x) @ m.w), w=torch.randn(300, 200, dtype=torch.complex64))
    w = noisy(model, max_grad_norm=3.0, verify=False, noise=noise, accountant=accountant)
    assert w.dtype == torch.complex64
    n, std = w.numel(), 0.7 * 3.0 / 8
    lo, hi = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], n)
    for part in (w.real, w.imag):
        assert lo <= float((part.double() / std).square().sum()) <= hi
    correlation = np.corrcoef(torch.stack([w.real, w.imag]).flatten(1).double().numpy())[0, 1]
    assert abs(correlation) < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(n)


def test_a_training_is_resumed_bit_for_bit(tmp_path):
    data = TensorDataset(torch.randn(20, D))

    def build():
        model = Use(lambda m, x: parts(fft(x) @ m.w), before=D, w=torch.ones(D, P, dtype=torch.complex64))
        engine = PrivacyEngine(model, batch_size=6, sample_size=20, steps=5, noise_multiplier=1.0)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        return model, engine, optimizer, Checkpointer(tmp_path / "saved", engine, optimizer)

    def train(model, engine, optimizer, steps):
        for batch, _ in zip(engine.batches(data, 3), range(steps), strict=False):
            for (x,) in batch:
                model(x).square().sum((1, 2)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, engine, optimizer, checkpoints = build()
    model.before.load_state_dict({name: torch.ones_like(p) for name, p in model.before.named_parameters()})
    train(model, engine, optimizer, 2)
    checkpoints.save()
    train(model, engine, optimizer, 2)
    resumed, *others, again = build()
    assert again.load()
    train(resumed, *others, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
