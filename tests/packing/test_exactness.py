"""Packed documents: one gradient, one coefficient, one contribution each; against a float64 oracle, one at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard import Packing, QuantileTracking
from dpshard.clipping.groups import STYLES
from dpshard.config import CLIPPING_MODES
from dpshard.losses import chunked_cross_entropy, packed_cross_entropy, sample_losses
from tests.grids import all_pairs
from tests.oracle import TOLERANCE, clipped_mean, gradients_of, noise_free_engine, norm, relative_error
from tests.packing.models import (
    LENGTHS,
    Blocks,
    D,
    LanguageModel,
    R,
    T,
    U,
    V,
    documents,
    expected,
    groups_of,
    half_clipped,
    inputs,
    per_document,
    step,
    unit_losses,
)

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:noise_multiplier=0")


HOW = {
    "eager": {},
    "checkpointing": {},
    "compiled blocks": {},
    "workers": {"num_workers": 2},
    "automatic": {"clipping_fn": "automatic"},
    "adaptive": {"adaptive_clipping": QuantileTracking(learning_rate=0.5)},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("how", "mode", "style"), all_pairs(HOW, CLIPPING_MODES, STYLES))
def test_modes_and_styles(how, mode, style):
    options = HOW[how]
    model, docs = Blocks(checkpoints=how == "checkpointing"), documents()
    fn = options.get("clipping_fn", "abadi")
    threshold, update = expected(model, docs, groups=groups_of(model, style), clipping_fn=fn)
    if how == "compiled blocks":
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager")
    found = step(model, docs, threshold, clipping_mode=mode, clipping_style=style, **options)
    assert relative_error(found, update) <= TOLERANCE


@pytest.mark.parametrize(
    ("packing", "units"),
    [
        (Packing(rows=1, tokens=T), 3),
        (Packing(rows=1, tokens=64), 20),
        (Packing(rows=3, tokens=T), 6),
        (Packing(rows=5, tokens=T, lengths=LENGTHS), 50),
    ],
)
def test_the_update_does_not_depend_on_the_packing(packing, units):
    model, docs = LanguageModel(), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(model, docs, threshold, packing=packing, units=units), update) <= TOLERANCE


def test_packed_equals_padded():
    """One document a row, padded to the longest, by the same engine without packing."""
    model, docs = LanguageModel(), documents()
    threshold, _ = expected(model, docs)
    ids = nn.utils.rnn.pad_sequence(docs, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(docs, batch_first=True, padding_value=-100)
    units, positions = torch.zeros_like(ids), torch.arange(T).expand(len(docs), T)
    engine = noise_free_engine(model, batch_size=len(docs), sample_size=len(docs), max_grad_norm=threshold)
    logits = model(ids, positions, units)
    sample_losses(logits[:, :-1], labels[:, 1:]).mean().backward()
    engine.privatize()
    padded = gradients_of(model)
    engine.detach()
    model.zero_grad()
    assert relative_error(step(model, docs, threshold), padded) <= 1e-10


def test_a_sum_of_units():
    model, docs = LanguageModel(), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(model, docs, threshold, loss_reduction="sum"), update) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    model, docs = LanguageModel(), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(torch.compile(model, backend=backend), docs, threshold), update) <= TOLERANCE


def test_a_longer_document_is_cut_at_the_row():
    model, docs = LanguageModel(), [*documents(), *documents(1, [T + 9])]
    threshold, update = expected(model, [ids[:T] for ids in docs])
    assert relative_error(step(model, docs, threshold), update) <= TOLERANCE


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_contributes_nothing_even_if_its_loss_is_not_finite(poison):
    model, docs = Experts(), documents()[:5]  # in attention, 0 * NaN would reach real tokens
    threshold, update = expected(model, docs)

    poisoned = []

    def forward(batch):
        logits = model(*inputs(batch))
        padding = batch["unit_ids"] < 0
        poisoned.append(int(padding.sum()))
        return logits.index_put((padding,), logits[padding] * poison)

    found = step(model, docs, threshold, forward=forward)
    assert sum(poisoned) > 0
    assert relative_error(found, update) <= TOLERANCE


def test_a_loss_at_padding_tokens_reaches_nothing():
    """Its gradients belong to no unit: they are dropped, not added to a unit."""
    model = LanguageModel()
    unit_ids = torch.tensor([[0] * 5 + [-1] * 7, [1] * 4 + [-1] * 8])
    batch = {"input_ids": torch.randint(0, V, (R, T)), "position_ids": torch.arange(T).expand(R, T)}
    engine = noise_free_engine(model, batch_size=2, max_grad_norm=1.0)
    with engine.packed(unit_ids, 2):
        logits = model(*inputs({**batch, "unit_ids": unit_ids}))
        logits[unit_ids < 0].square().sum().backward()
    engine.privatize()
    assert all(not g.any() for g in gradients_of(model).values())
    engine.detach()


def test_own_loops_in_which_ranks_or_collators_pack():
    model, docs = LanguageModel(), documents()
    threshold, update = expected(model, docs[:3])
    unit_ids = torch.cat([torch.full((len(ids),), i) for i, ids in enumerate(docs[:3])])[None]
    ids, positions = torch.cat(docs[:3])[None], torch.cat([torch.arange(len(ids)) for ids in docs[:3]])[None]
    labels = torch.where(positions == 0, -100, ids)
    engine = noise_free_engine(model, batch_size=3, max_grad_norm=threshold)
    batch = {"labels": labels, "unit_ids": unit_ids}
    with engine.packed(unit_ids, units=4):
        engine.verify(
            ids,
            positions,
            unit_ids,
            loss_fn=lambda logits, labels, unit_ids: packed_cross_entropy(logits, labels, unit_ids, 4).mean(),
            targets=(labels, unit_ids),
        )
        unit_losses(model(ids, positions, unit_ids), batch, 4).mean().backward()
    engine.privatize()
    assert relative_error(gradients_of(model), update) <= TOLERANCE
    engine.detach()


@pytest.mark.parametrize("numbers", [(0, 2, 7), (5, 2)])
def test_own_unit_ids_may_leave_numbers_out(numbers):
    model, docs = LanguageModel(), documents()[: len(numbers)]
    threshold, update = expected(model, docs)
    unit_ids = torch.cat([torch.full((len(ids),), i) for i, ids in zip(numbers, docs, strict=True)])[None]
    ids, positions = torch.cat(docs)[None], torch.cat([torch.arange(len(ids)) for ids in docs])[None]
    batch = {"labels": torch.where(positions == 0, -100, ids), "unit_ids": unit_ids}
    engine = noise_free_engine(model, batch_size=len(docs), max_grad_norm=threshold)
    with engine.packed(unit_ids, units=U):
        unit_losses(model(ids, positions, unit_ids), batch).mean().backward()
    nothing = torch.full_like(unit_ids, -1)
    with engine.packed(nothing, units=U):
        unit_losses(model(ids, positions, unit_ids), batch | {"unit_ids": nothing}).mean().backward()
    engine.privatize()
    assert relative_error(gradients_of(model), update) <= TOLERANCE
    engine.detach()


def test_a_loop_may_fill_its_unit_ids_again_before_backward():
    """Its tokens would count for units of the next micro-batch, one document for several thresholds."""
    model, docs = LanguageModel(), documents()
    threshold, update = expected(model, docs[:1])
    ids = docs[0][None]
    positions, unit_ids = torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
    batch = {"labels": torch.where(positions == 0, -100, ids), "unit_ids": unit_ids.clone()}
    engine = noise_free_engine(model, batch_size=1, max_grad_norm=threshold)
    with engine.packed(unit_ids, units=T):
        losses = unit_losses(model(ids, positions, batch["unit_ids"]), batch, T)
        unit_ids.copy_(positions)
        losses.mean().backward()
    engine.privatize()
    assert relative_error(gradients_of(model), update) <= TOLERANCE
    engine.detach()


WAYS = [
    *({"clipping_mode": mode} for mode in CLIPPING_MODES),
    *({"clipping_style": style} for style in STYLES),
    {"clipping_style": "layer-wise", "clipping_mode": "ghost"},
    {"clipping_fn": "automatic"},
    {"adaptive_clipping": QuantileTracking(learning_rate=0.5)},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_neighbouring_data_sets_move_the_sum_by_at_most_the_threshold(options):
    """Without one document the others are packed elsewhere; their gradients stay, so only its own is missing."""
    model, docs = Blocks(), documents()
    threshold, _ = expected(model, docs)
    whole = step(model, docs, threshold, **options)
    for gone in range(len(docs)) if options == WAYS[0] else [1]:
        rest = [ids for i, ids in enumerate(docs) if i != gone]
        fewer = step(model, rest, threshold, **options)
        moved = {name: len(docs) * whole[name] - len(rest) * fewer[name] for name in whole}
        assert 0 < norm(moved) <= threshold * (1 + 1e-9)


class Experts(nn.Module):
    """A mixture of experts on a packed stream: rows that the data picks are tokens, and tokens have units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.router = nn.Embedding(V, D), nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(D, V)
        self.double()

    def forward(self, ids, positions, unit_ids):
        x = self.tokens(ids).view(-1, D)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slots][:, None])
        return self.head(out.view(*ids.shape, D))


def test_experts():
    model, docs = Experts(), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(model, docs, threshold), update) <= TOLERANCE


class ChunkedHead(nn.Module):
    """The loss of every token without logits, whose tied head and embedding meet in one gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.double()

    def forward(self, ids, labels):
        hidden = self.body(self.tokens(ids)).tanh()
        return chunked_cross_entropy(hidden, self.tokens.weight, labels, per="token", chunk_size=5)


def test_a_head_without_logits():
    model, docs = ChunkedHead(), documents()
    after = [torch.cat([ids[1:], torch.tensor([-100])]) for ids in docs]
    items = [{"input_ids": ids, "labels": ids, "after": labels} for ids, labels in zip(docs, after, strict=True)]

    def alone(model, ids):
        return model(ids[None, :-1], ids[None, 1:]).mean()

    threshold, update = expected(model, docs, loss=alone)
    engine = noise_free_engine(model, batch_size=len(docs), sample_size=len(docs), max_grad_norm=threshold)
    for logical_batch in engine.batches(items, U, packing=Packing(rows=R, tokens=T)):
        for batch in logical_batch:
            units = batch["unit_ids"]
            labels = batch["after"].masked_fill(units < 0, -100)
            losses, counted = model(batch["input_ids"], labels), labels >= 0
            mine = [counted & (units == unit) for unit in range(U)]
            torch.stack([losses[one].sum() / max(1, int(one.sum())) for one in mine]).mean().backward()
        engine.privatize()
    assert relative_error(gradients_of(model), update) <= TOLERANCE
    engine.detach()


def test_checkpointed_parts():
    model, docs = LanguageModel(checkpoints=True), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(model, docs, threshold), update) <= TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_of_units(causal):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 7, V), torch.randint(0, V, (2, 7))
    unit_ids = torch.tensor([[0] * 4 + [3] * 3, [1] * 6 + [-1]])
    labels[0, 1] = -100
    found = packed_cross_entropy(logits, labels, unit_ids, 5, causal=causal)
    for unit in range(5):
        mine = logits[unit_ids == unit], labels[unit_ids == unit]
        logits_T, labels_T = (mine[0][:-1], mine[1][1:]) if causal else mine
        alone = F.cross_entropy(logits_T, labels_T) if len(labels_T) else torch.tensor(0.0)
        torch.testing.assert_close(found[unit], alone)


def test_a_bare_parameter_of_each_kind():
    """Scale, bias, addmm as GPT-2 uses it on flat tokens, and products with a weight and one derived from it."""

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.scale, self.shift = (
                nn.Embedding(V, D),
                nn.Parameter(torch.rand(D)),
                nn.Parameter(torch.rand(1, 1, D)),
            )
            self.weight, self.bias, self.other = (nn.Parameter(torch.rand(*s)) for s in ((D, D), (D,), (D, V)))
            self.double()

        def forward(self, ids, positions, unit_ids):
            x = self.tokens(ids) * self.scale + self.shift
            x = torch.addmm(self.bias, x.view(-1, D), self.weight).view(*ids.shape, D).tanh()
            x = torch.einsum("btd,ed->bte", x, self.weight) + x @ (1 + self.weight)
            return x @ self.other

    model, docs = Uses(), documents()
    threshold, update = expected(model, docs)
    assert relative_error(step(model, docs, threshold), update) <= TOLERANCE
    assert half_clipped(per_document(model, docs)) == threshold
    assert clipped_mean(per_document(model, docs), max_grad_norm=threshold, batch_size=8).keys() == update.keys()
