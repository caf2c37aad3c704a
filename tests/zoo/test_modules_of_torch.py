"""Modules of torch beyond the plain layers: attention, transformers, recurrent layers, parametrized weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.grids import all_pairs, each
from tests.oracle import Use
from tests.zoo.zoo import B, assert_model_exact

T, D, H = 4, 6, 4


def sequences():
    return {"x": torch.randn(B, T, D)}


def assert_exact(use, before=D, inputs=None, **parts):
    assert_model_exact(Use(use, before=before, **parts), inputs or sequences(), lambda output: output)


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "batch_first"), each([T, B], [True, False]))
def test_attention(batch_first, length):
    """Also with as many positions as samples, where shapes cannot distinguish them."""

    def use(m, x):
        x = x if batch_first else x.transpose(0, 1)
        y = m.attention(x, x.sin(), x)[0]
        return y if batch_first else y.transpose(0, 1)

    assert_exact(
        use, inputs={"x": torch.randn(B, length, D)}, attention=nn.MultiheadAttention(D, 2, batch_first=batch_first)
    )


@pytest.mark.parametrize(("norm_first", "batch_first"), each([True, False], [True, False]))
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


LAYERS = {
    "plain": {"batch_first": True},
    "time first, without bias": {"batch_first": False, "bias": False},
    "two layers, both directions": {"batch_first": True, "num_layers": 2, "bidirectional": True},
}


@pytest.mark.parametrize(("kind", "layers"), each(KINDS, LAYERS))
def test_recurrent_layers(kind, layers):
    options = LAYERS[layers]

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


LENGTHS = {"equal": [4, 4, 4], "sorted": [4, 2, 1], "not sorted": [1, 4, 2], "two alike": [2, 4, 2]}


def with_lengths(lengths):
    """Return inputs [B, T, D + 1]; the last feature is the length of the sequence."""
    sizes = torch.tensor(lengths, dtype=torch.float32)[:, None, None].expand(B, T, 1)
    return {"x": torch.cat([torch.randn(B, T, D), sizes], 2)}


def apart(x):
    """Return features [B, T, D] and lengths [B]."""
    return x[..., :D], x[:, 0, D].long()


def last(state):
    """Return the last h, and c if there is one, [B, ...]."""
    return torch.cat([x.transpose(0, 1).flatten(1) for x in (state if isinstance(state, tuple) else (state,))], 1)


@pytest.mark.parametrize(("kind", "lengths"), each(KINDS, LENGTHS))
def test_packed_sequences(kind, lengths):
    def use(m, x):
        x, sizes = apart(x)
        packed = pack_padded_sequence(m.map(x), sizes, batch_first=True, enforce_sorted=False)
        y, state = m.rnn(packed)
        y = pad_packed_sequence(y, batch_first=True, total_length=T)[0]
        return torch.cat([m.after(y).flatten(1), last(state)], 1)

    rnn = KINDS[kind](D, H, 2, batch_first=True, bidirectional=kind == "LSTM")
    after = nn.Linear(H * (1 + (kind == "LSTM")), 2)
    assert_exact(use, 0, with_lengths(LENGTHS[lengths]), rnn=rnn, map=nn.Linear(D, D), after=after)


ORDERS = ["found by torch", "sorted already", "sorted by the model"]


@pytest.mark.parametrize(
    ("order", "batch_first", "used"), all_pairs(ORDERS, [True, False], ["outputs", "last states", "both"])
)
def test_packed_sequences_in_any_order(order, batch_first, used):
    """Raw inputs (no map before), and heads other than linear maps, after rows and columns are in order again."""

    def use(m, x):
        x, sizes = apart(x)
        ranks = sizes.argsort(descending=True, stable=True)
        back = ranks.argsort()
        x = x if batch_first else x.transpose(0, 1)
        if order == "sorted by the model":
            x, sizes = (x[ranks] if batch_first else x[:, ranks]), sizes[ranks]
        packed = pack_padded_sequence(x, sizes, batch_first=batch_first, enforce_sorted=order != "found by torch")
        y, (h, c) = m.rnn(packed)
        y, _ = pad_packed_sequence(y, batch_first=batch_first, total_length=T)
        h = torch.cat([h[-2], h[-1], c[0]], 1)
        if order == "sorted by the model":
            y, h = (y[back] if batch_first else y[:, back]), h[back]
        y = y if batch_first else y.transpose(0, 1)
        read = []
        if used != "last states":
            read.append(m.conv(m.norm(y).transpose(1, 2)).flatten(1))
        if used != "outputs":
            read.append(m.after(m.norm2(h).tanh()))
        return torch.cat(read, 1)

    parts = {"rnn": nn.LSTM(D, H, 2, batch_first=batch_first, bidirectional=True, proj_size=3, bias=batch_first)}
    if used != "last states":
        parts |= {"norm": nn.LayerNorm(6), "conv": nn.Conv1d(6, 2, 2)}
    if used != "outputs":
        parts |= {"norm2": nn.LayerNorm(6 + H), "after": nn.Linear(6 + H, 2)}
    lengths = LENGTHS["sorted" if order == "sorted already" else "not sorted"]
    assert_exact(use, 0, with_lengths(lengths), **parts)


@pytest.mark.parametrize(("enforce_sorted", "kind"), each([True, False], ["LSTM", "GRU"]))
def test_packed_sequences_from_learned_states(kind, enforce_sorted):
    def use(m, x):
        x, sizes = apart(x)
        states = [p.expand(-1, len(x), -1).contiguous() for p in ((m.h, m.c) if kind == "LSTM" else (m.h,))]
        packed = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=enforce_sorted)
        y, state = m.rnn(packed, tuple(states) if kind == "LSTM" else states[0])
        y = pad_packed_sequence(y, batch_first=True, total_length=T)[0]
        return torch.cat([y.flatten(1), last(state)], 1)

    states = {name: torch.randn(2, 1, H) for name in ("hc" if kind == "LSTM" else "h")}
    inputs = with_lengths(LENGTHS["sorted" if enforce_sorted else "not sorted"])
    assert_exact(use, 0, inputs, rnn=KINDS[kind](D, H, 2, batch_first=True), **states)


@pytest.mark.parametrize("transposed", ["after sorting", "before"])
def test_what_is_read_of_packed_sequences(transposed):
    """Indexed last outputs, a mean without padding, an attention; sorted and transposed by hand."""

    def use(m, x):
        x, sizes = apart(x)
        ranks = sizes.argsort(descending=True, stable=True)
        x = x[ranks].transpose(0, 1) if transposed == "after sorting" else x.transpose(0, 1)[:, ranks]
        y, h = m.rnn(pack_padded_sequence(x, sizes[ranks]))
        back = ranks.argsort()
        y = pad_packed_sequence(y, total_length=T)[0].transpose(0, 1)[back]
        h = h.transpose(0, 1)[back].flatten(1)
        padding = torch.arange(T) >= sizes[:, None]
        y[padding] = 0
        last = m.first(y[torch.arange(len(y)), sizes - 1])
        mean = m.second(y.sum(1) / sizes[:, None])
        seen = m.attention(y, y, y, key_padding_mask=padding)[0].masked_fill(padding[..., None], 0)
        return torch.cat([last, mean, h, seen.flatten(1)], 1)

    parts = {
        "first": nn.Linear(H, 2),
        "second": nn.Linear(H, 2),
        "attention": nn.MultiheadAttention(H, 2, batch_first=True),
    }
    assert_exact(use, 0, with_lengths(LENGTHS["not sorted"]), rnn=nn.GRU(D, H), **parts)


def test_packed_sequences_of_which_a_sample_has_several():
    """Sentences of a document, [B * K, T, D]; a micro-batch is padded to its longest."""

    def use(m, x):
        K, x = 2, torch.stack([x, x.flip(1)], 1)
        sizes = torch.stack([x[:, 0, 0, D], 5 - x[:, 0, 0, D]], 1).long().flatten()
        packed = pack_padded_sequence(x[..., :D].flatten(0, 1), sizes, batch_first=True, enforce_sorted=False)
        y, h = m.rnn(packed)
        y = pad_packed_sequence(y, batch_first=True)[0].unflatten(0, (-1, K))
        return torch.cat([m.first(y).sum((1, 2)), m.second(h[-1].unflatten(0, (-1, K))).flatten(1)], 1)

    parts = {"first": nn.Linear(H, 2, bias=False), "second": nn.Linear(H, 2)}
    assert_exact(use, 0, with_lengths(LENGTHS["not sorted"]), rnn=nn.GRU(D, H, batch_first=True), **parts)


def test_a_packed_encoder_and_decoder():
    """The decoder starts from the encoder's states; its sequences have other lengths and another order."""

    def use(m, x):
        x, sizes = apart(x)
        packed = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
        _, state = m.encoder(packed)
        packed = pack_padded_sequence(m.map(x), 5 - sizes, batch_first=True, enforce_sorted=False)
        y, state = m.decoder(packed, state)
        return torch.cat([pad_packed_sequence(y, batch_first=True, total_length=T)[0].flatten(1), last(state)], 1)

    parts = {"encoder": nn.GRU(D, H), "decoder": nn.GRU(D, H), "map": nn.Linear(D, D)}
    assert_exact(use, 0, with_lengths(LENGTHS["not sorted"]), **parts)


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
