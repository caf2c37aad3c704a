"""Recurrent layers and cells: computed step by step in a private forward, they give what torch gives.

That their gradients are exact is tests/zoo/test_modules_of_torch.py's.
"""

import pytest
import torch
from torch import nn

from tests.oracle import noise_free_engine, randn

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

B, T, D, H = 3, 4, 6, 5
LAYERS = {
    "LSTM": nn.LSTM(D, H, 2, bidirectional=True),
    "LSTM, projections": nn.LSTM(D, H, 2, bidirectional=True, proj_size=2),
    "GRU": nn.GRU(D, H, 2, bidirectional=True),
    "GRU, no bias": nn.GRU(D, H, bias=False),
    "RNN": nn.RNN(D, H, 2),
    "RNN, relu": nn.RNN(D, H, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_numbers_of_layers_are_those_of_torch(name):
    layer, x = LAYERS[name].double(), randn(B, T, D)
    layer.batch_first = True
    expected, last = layer(x)
    engine = noise_free_engine(layer, batch_size=B, verify=False)
    found, found_last = layer(x)
    torch.testing.assert_close((found, found_last), (expected, last), rtol=1e-12, atol=1e-12)
    assert engine._interception.layouts.found  # this was a private forward
    engine.detach()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_the_numbers_of_cells_are_those_of_torch(kind):
    cell, x = kind(D, H).double(), randn(B, D)
    expected = cell(x)
    engine = noise_free_engine(cell, batch_size=B, verify=False)
    torch.testing.assert_close(cell(x), expected, rtol=1e-12, atol=1e-12)
    engine.detach()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_is_between_layers(p):
    layer, x = nn.GRU(D, H, 2, batch_first=True, dropout=p).double(), randn(B, T, D)
    engine = noise_free_engine(layer, batch_size=B, verify=False)
    first, second = layer(x)[0], layer(x.flip(1))[0]
    assert torch.equal(first, second) == (p == 1.0)  # drops all: the second layer sees zeros
    engine.detach()
