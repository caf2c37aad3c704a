"""Modules of torch beyond the plain layers: attention, transformers, recurrent layers, parametrized weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import Use
from tests.zoo.zoo import B, assert_model_exact

T, D, H = 4, 6, 4


def sequences():
    return {"x": torch.randn(B, T, D)}


def assert_exact(use, before=D, inputs=None, **parts):
    assert_model_exact(Use(use, before=before, **parts), inputs or sequences(), lambda output: output)


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [T, B])
def test_attention(batch_first, length):
    """Also with as many positions as samples, where no shape can tell the one from the other."""

    def use(m, x):
        x = x if batch_first else x.transpose(0, 1)
        y = m.attention(x, x.sin(), x)[0]
        return y if batch_first else y.transpose(0, 1)

    assert_exact(
        use, inputs={"x": torch.randn(B, length, D)}, attention=nn.MultiheadAttention(D, 2, batch_first=batch_first)
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(batch_first, norm_first):
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, **options), 2)

    def use(m, x):
        x = x if batch_first else x.transpose(0, 1)
        y = m.decoder(x.cos(), m.encoder(x))
        return y if batch_first else y.transpose(0, 1)

    assert_exact(use, encoder=encoder, decoder=decoder)


# --- recurrent layers -----------------------------------------------------------------------------------------------

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN-tanh": nn.RNN,
    "RNN-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "batch_first": False},
        {"num_layers": 2, "bidirectional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers(kind, options):
    options = {"batch_first": True, **options}

    def use(m, x):
        y, state = m.rnn(x if options["batch_first"] else x.transpose(0, 1))
        y = y if options["batch_first"] else y.transpose(0, 1)
        last = torch.cat([part.transpose(0, 1).flatten(1) for part in (state if kind == "LSTM" else (state,))], 1)
        return torch.cat([y.flatten(1), last], 1)

    assert_exact(use, rnn=KINDS[kind](D, H, **options))


def test_projections():
    assert_exact(
        lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, H, 2, batch_first=True, proj_size=2, bidirectional=True, dropout=0.0)
    )


def test_a_recurrent_layer_as_long_as_the_batch():
    assert_exact(lambda m, x: m.rnn(x)[0], inputs={"x": torch.randn(B, B, D)}, rnn=nn.GRU(D, H, batch_first=True))


def test_learned_initial_states():
    def use(m, x):
        states = (m.h.expand(-1, len(x), -1).contiguous(), m.c.expand(-1, len(x), -1).contiguous())
        return m.rnn(x, states)[0]

    assert_exact(use, rnn=nn.LSTM(D, H, batch_first=True), h=torch.randn(1, 1, H), c=torch.randn(1, 1, H))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    def use(m, x):
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)

    assert_exact(use, cell=kind(D, H))


LENGTHS = {"equal": [4, 4, 4]}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, lengths):
    def use(m, x):
        x, sizes = x[..., :D], x[:, 0, D].long()
        packed = pack_padded_sequence(m.map(x), sizes, batch_first=True, enforce_sorted=False)
        y, state = m.rnn(packed)
        y = pad_packed_sequence(y, batch_first=True, total_length=T)[0]
        return torch.cat([y.flatten(1), (state[0] if kind == "LSTM" else state).transpose(0, 1).flatten(1)], 1)

    sizes = torch.tensor(LENGTHS[lengths], dtype=torch.float32)[:, None, None].expand(B, T, 1)
    x = torch.cat([torch.randn(B, T, D), sizes], 2)
    rnn = KINDS[kind](D, H, 2, batch_first=True, bidirectional=kind == "LSTM")
    assert_exact(use, 0, {"x": x}, rnn=rnn, map=nn.Linear(D, D))


# --- weights that are functions of parameters -----------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric():
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.utils.weight_norm(nn.Linear(D, H)),
        lambda: parametrizations.weight_norm(nn.Linear(D, H)),
        lambda: parametrizations.orthogonal(nn.Linear(D, D)),
        lambda: parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="cayley"),
        lambda: parametrizations.spectral_norm(nn.Linear(D, H)),
        lambda: nn.utils.spectral_norm(nn.Linear(D, H)),
        symmetric,
    ],
    ids=["weight_norm, old", "weight_norm", "orthogonal", "cayley", "spectral_norm", "spectral_norm, old", "symmetric"],
)
def test_parametrizations(build):
    assert_exact(lambda m, x: m.layer(x), layer=build())
