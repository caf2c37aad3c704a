"""Modules of torch that combine several rules, against the oracle."""

import pytest
import torch
from torch import nn

from tests.oracle import Use, assert_exact, randn

E, HEADS = 4, 2


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("B", [3, 4])
def test_self_attention(batch_first, need_weights, B):
    def use(m, x):
        x = x if batch_first else x.transpose(0, 1)
        y = m.attention(x, x, x, need_weights=need_weights)[0]
        return y if batch_first else y.transpose(0, 1)

    attention = nn.MultiheadAttention(E, HEADS, batch_first=batch_first)
    assert_exact(Use(use, before=E, attention=attention), randn(B, 4, E), modes=["auto", "ghost"])


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 3, "vdim": 2}],
    ids=str,
)
def test_cross_attention(options):
    def use(m, x):
        return m.attention(x, x.sin()[..., : m.attention.kdim], x.cos()[..., : m.attention.vdim])[0]

    attention = nn.MultiheadAttention(E, HEADS, batch_first=True, **options)
    assert_exact(Use(use, before=E, attention=attention), randn(4, 4, E))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder(norm_first, activation):
    layer = nn.TransformerEncoderLayer(
        E, HEADS, 8, dropout=0.0, batch_first=True, norm_first=norm_first, activation=activation
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert_exact(encoder, randn(4, 4, E), modes=["auto", "ghost"])


def test_transformer_with_time_first():
    layer = nn.TransformerEncoderLayer(E, HEADS, 8, dropout=0.0)
    model = Use(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)
    assert_exact(model, randn(4, 4, E), modes=["auto", "ghost"])


def test_transformer_decoder():
    layer = nn.TransformerDecoderLayer(E, HEADS, 8, dropout=0.0, batch_first=True)
    model = Use(lambda m, x: m.layer(x, x.sin()), before=E, layer=layer)
    assert_exact(model, randn(4, 4, E), modes=["auto", "ghost"])


def test_activations_in_place():
    assert_exact(nn.Sequential(nn.Linear(E, E), nn.ReLU(inplace=True), nn.Linear(E, 3)), randn(4, 4, E))
    convolutions = nn.Sequential(
        *(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.GroupNorm(1, 4), nn.SiLU(inplace=True)),
        *(nn.ConvTranspose2d(4, 4, 2), nn.Hardtanh(inplace=True), nn.InstanceNorm2d(4, affine=True), nn.ReLU(True)),
    )
    assert_exact(convolutions, randn(3, 4, 4, 4))
    norms = nn.Sequential(nn.LayerNorm(E), nn.SiLU(True), nn.RMSNorm(E), nn.ReLU(True), nn.PReLU(), nn.SiLU(True))
    assert_exact(norms, randn(4, 4, E))


def test_residuals_in_place():
    def use(m, x):
        y = m.first(x)
        y += x
        z = m.second(y)
        z.add_(y).mul_(0.5)
        return z

    assert_exact(Use(use, before=E, first=nn.Linear(E, E), second=nn.Linear(E, E)), randn(4, 4, E))


def test_lists_and_dicts_of_parameters():
    def use(m, x):
        return sum(x * scale for scale in m.scales) @ m.maps["out"]

    parts = {
        "scales": nn.ParameterList([randn(E), randn(E)]),
        "maps": nn.ParameterDict({"out": nn.Parameter(randn(E, 2))}),
    }
    assert_exact(Use(use, before=E, **parts), randn(4, 4, E))


EMPTY = {
    "Linear(4, 0)": lambda: nn.Linear(4, 0),
    "Linear(0, 4)": lambda: nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4)),
    "Bilinear": lambda: nn.Bilinear(4, 4, 0),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(4, 0), nn.LayerNorm(0)),
    "four of LayerNorm": lambda: nn.Sequential(nn.Linear(4, 0), *(nn.LayerNorm(0) for _ in range(4))),
    "Embedding": lambda: nn.Embedding(5, 0),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", EMPTY)
def test_weights_without_elements_train(name):
    def use(m, x):
        inputs = [x.new_ones(x.shape, dtype=torch.long) if name == "Embedding" else x] * (1 + (name == "Bilinear"))
        return m.head(x) + m.layer(*inputs).flatten(1).sum(1, keepdim=True)

    assert_exact(Use(use, layer=EMPTY[name](), head=nn.Linear(4, 3), unused=randn(0)), randn(5, 4))
