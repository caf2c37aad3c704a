"""Norms and clipped sums are computed in IEEE float32, whatever the precision of the user's products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard import PrivacyEngine
from dpshard.losses import chunked_cross_entropy
from dpshard.records.precision import exact_convolutions, exact_products
from dpshard.rules import vocabulary

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def settings():
    b = torch.backends
    parts = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv)
    return [part.fp32_precision for part in parts], torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def restored():
    matmul, convolution = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = matmul
    torch.backends.mkldnn.conv.fp32_precision = convolution


class Head(nn.Linear):
    def __init__(self):
        super().__init__(6, 9, bias=False)

    def forward(self, hidden, labels):
        return chunked_cross_entropy(hidden, self.weight, labels)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_exact_within_and_as_they_were_behind(precision):
    torch.set_float32_matmul_precision(precision)
    before = settings()
    with exact_products(CUDA), exact_products(CPU), exact_convolutions(CUDA), exact_convolutions(CPU):
        b = torch.backends
        within = [p.fp32_precision for p in (b.cuda.matmul, b.cudnn.conv, b.mkldnn.matmul, b.mkldnn.conv)]
        assert set(within) <= {"ieee", "none"}
        assert torch.get_float32_matmul_precision() == "highest" or precision == "highest"
        assert not torch._C._get_cudnn_allow_tf32()  # the older switch agrees, or kernels would raise
    assert settings() == before


def test_convolutions_on_a_gpu_repeat_their_bits(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    with exact_convolutions(CPU):
        assert (cudnn.deterministic, cudnn.benchmark) == (False, True)
    with exact_convolutions(CUDA):
        assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    assert (cudnn.deterministic, cudnn.benchmark) == (False, True)


def test_the_head_of_a_chunked_loss_is_measured_in_exact_products(monkeypatch):
    """The clipped sum repeats the products of the forward; TF32 in one of them would change the norm alone."""
    torch.set_float32_matmul_precision("medium")
    positions_of, seen = vocabulary.positions_of, []

    def watched(*args, **kwargs):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return positions_of(*args, **kwargs)

    monkeypatch.setattr(vocabulary, "positions_of", watched)
    model = Head()
    engine = PrivacyEngine(model, batch_size=4, sample_size=8, steps=1, noise_multiplier=1.0, verify=False)
    with pytest.warns(UserWarning, match="own batches"):
        model(torch.randn(4, 3, 6), torch.zeros(4, 3).long()).mean().backward()
    engine.detach()
    assert seen
    assert set(seen) <= {"ieee", "none"}
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.parametrize("clipping_style", ["all-layer", "layer-wise"])
def test_the_engine_measures_and_sums_in_exact_products(clipping_style, monkeypatch):
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    seen = []

    def watch(name):
        operator = getattr(torch, name)

        def call(*args, **kwargs):
            seen.append((name, torch.backends.mkldnn.matmul.fp32_precision))
            return operator(*args, **kwargs)

        monkeypatch.setattr(torch, name, call)

    aten = torch.ops.aten

    class Aten:
        def __getattr__(self, name):
            return getattr(aten, name)

        def convolution_backward(self, *args):
            seen.append(("convolution", torch.backends.mkldnn.conv.fp32_precision))
            return aten.convolution_backward(*args)

    for name in ("bmm", "mm", "matmul", "einsum"):
        watch(name)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(48, 4))
    engine = PrivacyEngine(
        model, batch_size=4, sample_size=8, steps=1, noise_multiplier=1.0, clipping_style=clipping_style, verify=False
    )
    monkeypatch.setattr("dpshard.records.convolution.torch.ops.aten", Aten())
    with pytest.warns(UserWarning, match="own batches"):
        loss = F.cross_entropy(model(torch.randn(4, 1, 6, 6)), torch.tensor([0, 1, 2, 3]))
    seen.clear()
    loss.backward()
    engine.detach()
    assert "convolution" in dict(seen)
    assert {precision for _, precision in seen} <= {"ieee", "none"}
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
