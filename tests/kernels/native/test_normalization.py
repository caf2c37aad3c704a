"""Compiled per-sample gradients of normalisation layers are those of autograd."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from dpshard import PrivacyEngine
from dpshard.kernels import native

NORMALIZATIONS = {
    "rows": (0, (3, 7, 33)),
    "many rows": (0, (2, 1000, 5)),
    "one row": (0, (1, 1, 3000)),
    "channels": (2, (3, 6, 40)),
    "channels alone": (5, (2, 5, 7)),
    "all channels": (1, (2, 3, 5000)),
    "no space": (2, (3, 8, 1)),
}


def differentiated(x, gradient, groups, centered):
    """Return gradients of weights and biases in float64, by autograd."""
    made = []
    for row, g in zip(x.double(), gradient.double(), strict=True):
        n = len(row) if groups else row.shape[1]
        weight, bias = (torch.full((n,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
        together = row.reshape(groups, -1) if groups else row
        normalize = F.layer_norm if centered else F.rms_norm
        normalized = normalize(together, together.shape[1:], eps=1e-3).view(row.shape)
        y = normalized * weight.view(-1, *[1] * bool(groups)) + bias.view(-1, *[1] * bool(groups))
        made.append(torch.stack(torch.autograd.grad(y, (weight, bias), g)))
    return torch.stack(made, 1)


def layer(shape):
    generator = torch.Generator().manual_seed(shape[2])
    return torch.randn(shape, generator=generator) * 3 + 5, torch.randn(shape, generator=generator) + 1


@pytest.mark.parametrize(("groups", "shape"), NORMALIZATIONS.values(), ids=NORMALIZATIONS.keys())
@pytest.mark.parametrize("centered", [True, False])
def test_gradients_of_normalisations_are_those_of_autograd(groups, shape, centered, set_threads):
    x, gradient = layer(shape)
    expected, made = differentiated(x, gradient, groups, centered), []
    for threads in (1, 3):
        set_threads(threads)
        strided = torch.stack((x, x), -1)[..., 0], gradient.mT.contiguous().mT
        pairs = (x, gradient), strided
        made += [native.normalization_gradients(*pair, groups, 1e-3, centered=centered) for pair in pairs]
    largest = expected.abs().amax((1, 2), keepdim=True)
    torch.testing.assert_close(made[0] / largest, expected / largest, rtol=0, atol=1e-5, check_dtype=False)
    assert all(torch.equal(made[0], other) for other in made[1:])
    alone = native.normalization_gradients(x[-1:], gradient[-1:], groups, 1e-3, centered=centered)
    assert torch.equal(alone[:, 0], made[0][:, -1])


@pytest.mark.parametrize("groups", [0, 1])
def test_sums_over_large_images_do_not_stop_growing(groups):
    """A single sum in float32 stops at 2^24."""
    n = 2**25
    x, gradient = torch.tensor([0.5, 1.5]).repeat(n // 2).view((-1, 2) if not groups else (1, -1))[None], torch.ones(())
    made = native.normalization_gradients(x, gradient.expand(x.shape), groups, 0.0, centered=True)
    of_bias = float(made[1].sum())
    assert of_bias == pytest.approx(n, rel=1e-6)
    made = native.normalization_gradients(x, x - 1, groups, 0.0, centered=True)
    assert made[0].abs().sum().item() == pytest.approx(n / 2, rel=1e-6)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_a_layer_stays_with_its_sample(groups, bad):
    for place in (0, 1):
        pair = layer((3, 4, 4))
        pair[place][1, 2, 3] = bad
        made = native.normalization_gradients(*pair, groups, 1e-3, centered=True)
        assert made.isfinite().all((0, 2)).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(8),
        nn.LayerNorm((3, 8), eps=0.1),
        nn.LayerNorm(8, bias=False),
        nn.RMSNorm(8),
        nn.RMSNorm(8, eps=0.1),
        nn.GroupNorm(3, 6, eps=0.1),
        nn.InstanceNorm1d(6, affine=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:.*noise_multiplier")
def test_layers_are_the_same_without_it(module, dtype, switch_off):
    x = torch.randn(4, 6, 3, 8, generator=torch.Generator().manual_seed(0))
    x = (x if isinstance(module, nn.LayerNorm | nn.RMSNorm) else x.flatten(2)).to(dtype)

    def clipped(trained):
        model = copy.deepcopy(module).to(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        settings = {"batch_size": 4, "sample_size": 100, "epochs": 1, "noise_multiplier": 0.0, "max_grad_norm": 0.7}
        engine = PrivacyEngine(model, **settings)
        model(x).square().flatten(1).mean(1).mean().backward()
        engine.privatize()
        return [p.grad for p in model.parameters() if p.requires_grad]

    assert native.supports_normalization(x.device, torch.float32)
    names = [name for name, _ in module.named_parameters()]
    trained = [[name] for name in names] + [names]
    compiled = [clipped(some) for some in trained]
    switch_off()
    for some, gradients in zip(trained, compiled, strict=True):
        for ours, torchs in zip(gradients, clipped(some), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_other_layers_are_refused():
    x, gradient = layer((3, 4, 4))
    for pair, groups in (((x.double(), gradient), 0), ((x, gradient[:2]), 0), ((x, gradient), 3), ((x[0], x[0]), 0)):
        with pytest.raises(ValueError, match="No gradients of a normalisation"):
            native.normalization_gradients(*pair, groups, 1e-3, centered=True)
    assert not native.supports_normalization(x.device, torch.float64)
    assert not native.supports_normalization(torch.device("meta"), torch.float32)
    assert native.normalization_gradients(x[:0], gradient[:0], 0, 1e-3, centered=True).shape == (2, 0, 4)
    with FakeTensorMode():
        fake = torch.empty(3, 6, 8), torch.empty(3, 6, 8)
        assert native.normalization_gradients(*fake, 0, 1e-3, centered=True).shape == (2, 3, 8)
        assert native.normalization_gradients(*fake, 2, 1e-3, centered=True).shape == (2, 3, 6)
