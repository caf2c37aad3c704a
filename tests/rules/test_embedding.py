"""Tables that are read by index, against the oracle.

Failure modes: 6 test_padding_idx, test_bags_of_padded_ids; 13 test_positions_without_a_batch_dimension.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpshard.errors import BatchLayoutError, UnsupportedParameterError
from tests.oracle import Use, assert_exact, private_step, randn

V, C, T = 7, 3, 4


def token_ids(*shape):
    """Return ids with many repetitions, and without the last row."""
    return torch.randint(0, 4, shape)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 4), max_size=2), B=st.integers(1, 5))
def test_embedding_of_ids_of_any_rank(shape, B):
    assert_exact(nn.Embedding(V, C), token_ids(B, *shape))


def test_ids_of_other_layouts_and_types():
    assert_exact(Use(lambda m, i: F.embedding(i.t(), m.w).transpose(0, 1), w=randn(V, C)), token_ids(4, 4))
    assert_exact(Use(lambda m, i: F.embedding(i.flatten(), m.w).view(-1, T, C), w=randn(V, C)), token_ids(4, T))
    assert_exact(
        Use(lambda m, i: F.embedding(i.t().flatten(), m.w).view(T, -1, C).transpose(0, 1), w=randn(V, C)),
        token_ids(4, T),
    )
    assert_exact(nn.Embedding(V, C), token_ids(4, T).int())


@pytest.mark.parametrize("padding_idx", [0, 3, -1, -V])
def test_padding_idx(padding_idx):
    ids = token_ids(4, T)
    ids[:, 0] = torch.tensor([i for i in range(V) if i != padding_idx % V][:4])  # something that is no padding
    ids[:, 2] = padding_idx % V
    assert_exact(nn.Embedding(V, C, padding_idx=padding_idx), ids)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize(
    "function", [lambda ids, w, p: F.embedding(ids, w, p), lambda ids, w, p: torch.embedding(w, ids, p)]
)
def test_functions_read_padding_idx_in_their_own_ways(function, padding_idx):
    """For F.embedding -1 is the last row, for torch.embedding no row."""
    ids = torch.tensor([[V - 1, 0], [1, 2], [V - 1, 3]])
    assert_exact(Use(lambda m, ids: function(ids, m.w, padding_idx), w=randn(V, C)), ids)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -2])
def test_bags_of_padded_ids(mode, padding_idx):
    ids = token_ids(4, T)
    ids[:, 0] = torch.tensor([0, 1, 3, 4])
    if padding_idx is not None:
        ids[:, 2:] = padding_idx % V
    model = nn.Sequential(nn.EmbeddingBag(V, C, mode=mode, padding_idx=padding_idx), nn.Linear(C, 2))
    assert_exact(model, ids)


def test_an_empty_bag_is_zero():
    model = nn.Sequential(nn.EmbeddingBag(V, C, mode="max", padding_idx=0), nn.Linear(C, 2))
    ids = token_ids(4, T)
    ids[1] = 0
    assert_exact(model, ids)


def test_a_bag_may_hold_the_last_row():
    """For torch.embedding -1 is no padding, for torch.embedding_bag the last row."""
    ids = torch.tensor([[V - 1, 0], [1, V - 1], [V - 1, V - 1]])
    assert_exact(nn.Sequential(nn.EmbeddingBag(V, C, mode="max"), nn.Linear(C, 2)), ids)


def test_weighted_bags():
    def weighted(m, ids):
        return F.embedding_bag(ids, m.w, mode="sum", per_sample_weights=ids.double().cos())

    assert_exact(Use(weighted, w=randn(V, C)), token_ids(4, T))


@pytest.mark.parametrize(
    ("use", "shape"),
    [
        (lambda m, i: m.w[i], (V, C)),
        (lambda m, i: m.w[i - 4], (V, C)),  # from the end
        (lambda m, i: m.w[i.flatten()].view(*i.shape, C), (V, C)),
        (lambda m, i: m.w[i, :2], (V, C)),
        (lambda m, i: m.w[i, 1], (V, C)),
        (lambda m, i: m.w[i, i[:, :1]], (V, C + 4)),
        (lambda m, i: m.w[:, i].movedim(0, -1), (C, V)),
        (lambda m, i: m.w[i, None], (V, C)),
        (lambda m, i: m.w[..., i].movedim(0, -1), (C, V)),
        (lambda m, i: m.w.index_select(0, i.flatten()).view(*i.shape, C), (V, C)),
        (lambda m, i: torch.index_select(m.w, 1, i.flatten()).view(C, *i.shape).movedim(0, -1), (C, V)),
        (lambda m, i: m.w.take(i), (V,)),
        (lambda m, i: torch.gather(m.w.expand(len(i), -1), 1, i), (V,)),
        (lambda m, i: torch.gather(m.w, 0, i), (V, T)),
        (lambda m, i: torch.take_along_dim(m.w, i, 0), (V, T)),
        (lambda m, i: F.one_hot(i, V).to(m.w.dtype) @ m.w, (V, C)),
    ],
)
def test_tables_read_without_embedding(use, shape):
    assert_exact(Use(use, w=randn(*shape)), token_ids(4, T))


POSITIONS = {
    "[T]": lambda x: torch.arange(x.shape[1], device=x.device),
    "[1, T]": lambda x: torch.arange(x.shape[1], device=x.device)[None],
    "[B, T]": lambda x: torch.arange(x.shape[1], device=x.device).expand(len(x), -1),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("B", [3, T])
def test_positions_without_a_batch_dimension(positions, B):
    model = Use(lambda m, x: x + m.table(positions(x)), before=C, table=nn.Embedding(9, C))
    assert_exact(model, randn(B, T, C))


def test_relative_positions():
    """A [T, T] table of repeated ids, as in T5 (embedding) and Swin (index), added to attention scores; T = B."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = lambda x: (x @ x.mT).unsqueeze(1)  # noqa: E731

    def embedded(m, x):
        return scores(x) + m.t(distance.abs().to(x.device)).permute(2, 0, 1)

    t5 = Use(embedded, before=C, t=nn.Embedding(T, 2))
    assert_exact(t5, randn(T, T, C))
    flat = (distance + T - 1).view(-1)

    def indexed(m, x):
        return scores(x) + m.t[flat.to(x.device)].view(T, T, -1).permute(2, 0, 1)[None]

    swin = Use(indexed, before=C, t=randn(2 * T, 2))
    assert_exact(swin, randn(T, T, C))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_norm": 1.0}, "max_norm"),  # verification notices it first, because forward writes into the table
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "set sparse=False"),
    ],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_that_have_no_per_sample_gradient_are_refused(kind, options, reason):
    with pytest.raises(
        UnsupportedParameterError, match=f"weight in the model .*embedding.*{reason}|weight: forward writes"
    ):
        assert_exact(kind(V, C, **options), token_ids(4, T), modes=["auto"])


def test_trained_bag_weights():
    def weights(m, ids):
        return F.embedding_bag(ids, m.w, mode="sum", per_sample_weights=m.s.expand(len(ids), -1))

    assert_exact(Use(weights, w=randn(V, C), s=randn(T)), token_ids(4, T))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_flat_ids(mode, last):
    """Two bags a sample, [B, 2, T / 2] flattened."""

    def flat(m, ids):
        offsets = torch.arange(0, ids.numel() + last, T // 2, device=ids.device)
        y = F.embedding_bag(ids.flatten(), m.w, offsets, mode=mode, include_last_offset=last, padding_idx=0)
        return y.view(-1, 2, C)

    ids = token_ids(4, T)
    ids[2, : T // 2] = 0
    ids[:, -1] = 1  # something that is no padding
    assert_exact(Use(flat, w=randn(V, C)), ids, modes=["auto", "ghost"])


def test_samples_in_the_middle_of_a_flattened_dimension_are_refused():
    def by_field(m, ids):
        fields = ids.view(len(ids), 2, -1).transpose(0, 1).flatten()  # [2, B, T / 2]
        offsets = torch.arange(0, ids.numel(), T // 2, device=ids.device)
        y = F.embedding_bag(fields, m.w, offsets, mode="sum")
        return y.view(2, -1, C).transpose(0, 1)

    model = Use(by_field, w=randn(V, C)).double()
    with pytest.raises(BatchLayoutError, match=r"embedding with w .* neither side by side.*samples first"):
        private_step(model, (token_ids(4, T),), verify=False)
