"""What is wrong with packed rows raises an error that says so; nothing is trained on it.

Failure modes: 8 test_functions_over_the_row_are_caught_or_refused; 12 test_attention_that_looks_across_is_caught,
test_a_detached_look_across_is_caught, test_a_mean_over_drawn_tokens_is_caught.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard import Packing, UnitDataset
from dpshard.errors import (
    BatchLayoutError,
    ConfigurationError,
    DataError,
    LogicalBatchError,
    UnsupportedParameterError,
    VerificationError,
)
from dpshard.losses import packed_cross_entropy
from tests.oracle import gradients_of, noise_free_engine, norm
from tests.packing.models import PACKING, D, LanguageModel, T, U, V, documents, inputs, step, unit_losses

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:noise_multiplier=0")


@pytest.mark.parametrize("wrong", [{"segments": False}, {"positions": False}], ids=["attention", "positions"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_that_looks_across_is_caught(wrong, dtype):
    error = {"segments": VerificationError, "positions": UnsupportedParameterError}[next(iter(wrong))]
    with pytest.raises(error, match=r"attention looks across units .*positions do not restart|position_ids \[R, T\]"):
        step(LanguageModel(dtype=dtype, **wrong), documents(), 1.0)


def test_attention_that_looks_across_is_caught_where_units_are_first_side_by_side():
    """Packing begins with the longest documents, one a row, which show nothing."""
    model, docs = LanguageModel(segments=False), documents(lengths=[T] * 6 + [5, 4, 3])
    alone_first = []
    with pytest.raises(VerificationError, match="attention looks across units"):
        step(model, docs, 1.0, forward=lambda batch: (alone_first.append(batch), model(*inputs(batch)))[1])
    assert len(alone_first) == 4
    assert all(batch["position_ids"].argmax(1).eq(T - 1).all() for batch in alone_first[:3])


@pytest.mark.parametrize("mix", ["behind", "before"])
def test_one_pair_side_by_side_among_single_units_is_caught(mix):
    """Wherever in the stream the pair lies."""
    for lengths in ([T, T, T, 7, 5], [9, 3, 8], [8, 4, T, T, T]):
        R = 4 if len(lengths) == 5 else 2
        packing = Packing(rows=R, tokens=T)
        shift = {"behind": 1, "before": -1}[mix]
        across = lambda self, x, unit_ids, by=shift: x + x.roll(by, 1).detach()  # noqa: E731
        with pytest.raises((VerificationError, UnsupportedParameterError)):
            step(Mixer(across), documents(lengths=lengths), 1.0, packing=packing)


def test_positions_that_do_not_restart_are_caught():
    model = LanguageModel()

    def forward(batch):
        return model(batch["input_ids"], torch.arange(T).expand(2, T), batch["unit_ids"])

    with pytest.raises(BatchLayoutError, match="positions that do not restart in every unit"):
        step(model, documents(), 1.0, forward=forward)


def test_a_feature_of_the_number_of_a_unit_is_caught():
    """The number of a unit depends on which others were drawn."""
    mix = lambda self, x, unit_ids: x + self.numbers(unit_ids.clamp(min=0))  # noqa: E731
    with pytest.raises(VerificationError, match="packed rows"):
        step(Mixer(mix, numbers=nn.Embedding(U, D)), documents(), 1.0)


class Mixer(nn.Module):
    """Token embeddings, `mix(self, x, unit_ids)`, and a head."""

    def __init__(self, mix, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.tokens, self.head = mix, nn.Embedding(V, D), nn.Linear(D, V)
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()

    def forward(self, ids, positions, unit_ids):
        return self.head(self.mix(self, self.tokens(ids), unit_ids))


def test_a_detached_look_across_is_caught():
    with pytest.raises(VerificationError, match="attention looks across units"):
        step(Mixer(lambda _, x, __: x / x.detach().norm(dim=(1, 2), keepdim=True)), documents(), 1.0)


@pytest.mark.parametrize(
    ("mix", "parts"),
    [
        (lambda self, x, _: self.conv(x.mT).mT, {"conv": nn.Conv1d(D, D, 3, padding=1)}),
        (lambda self, x, _: self.rnn(x)[0], {"rnn": nn.GRU(D, D, batch_first=True)}),
        (lambda _, x, __: x.roll(1, 1), {}),
        (lambda _, x, __: x.flip(1), {}),
        (lambda self, x, _: x + self.table[:T], {"table": nn.Parameter(torch.rand(40, D))}),
        (lambda self, x, _: x + self.line(x.mean(1, keepdim=True)), {"line": nn.Linear(D, D)}),
        (lambda self, x, _: x.cumsum(1), {}),
        (
            lambda self, x, _: self.joined(x.view(len(x), T // 2, 2 * D)).view(x.shape),
            {"joined": nn.Linear(2 * D, 2 * D)},
        ),
        (
            lambda self, x, _: torch.cat([self.cls.expand(len(x), 1, D), x], 1)[:, :-1],
            {"cls": nn.Parameter(torch.rand(1, 1, D))},
        ),
        (lambda self, x, _: self.norm(x.mT).mT, {"norm": nn.GroupNorm(2, D)}),
        (lambda self, x, _: self.norm(x.mT).mT, {"norm": nn.LayerNorm(T)}),
    ],
    ids=["conv", "gru", "shift", "flip", "table", "mean", "sum", "pairs", "class token", "group norm", "time norm"],
)
def test_functions_over_the_row_are_caught_or_refused(mix, parts):
    with pytest.raises((UnsupportedParameterError, VerificationError), match=r"packed rows|no rule gives"):
        step(Mixer(mix, **parts), documents(), 1.0)


def test_a_mean_over_drawn_tokens_is_caught():
    model, docs = LanguageModel(), documents()[:3]
    unit_ids = torch.cat([torch.full((len(ids),), i) for i, ids in enumerate(docs)])[None]
    ids, positions = torch.cat(docs)[None], torch.cat([torch.arange(len(ids)) for ids in docs])[None]
    labels = torch.where(positions == 0, -100, ids)
    engine = noise_free_engine(model, batch_size=3)

    def token_mean(logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def sum_over_drawn(logits, labels, unit_ids):
        losses = packed_cross_entropy(logits, labels, unit_ids, 3)
        return losses.sum() / (losses > 0).sum()

    with engine.packed(unit_ids, 3):
        engine.verify(
            ids, positions, unit_ids, loss_fn=lambda *x: packed_cross_entropy(*x, 3).mean(), targets=(labels, unit_ids)
        )
        for loss, targets in ((token_mean, (labels,)), (sum_over_drawn, (labels, unit_ids))):
            with pytest.raises(VerificationError, match="divided by the number of tokens, or of units"):
                engine.verify(ids, positions, unit_ids, loss_fn=loss, targets=targets)
    engine.detach()


def test_a_token_mean_of_the_loop_counts_a_document_several_times():
    """docs/units.md has the figure. The engine sees gradients of such a loss, in which its divisor is a constant."""

    def total(docs, threshold, loss):
        model = LanguageModel()
        engine = noise_free_engine(model, batch_size=len(docs), sample_size=len(docs), max_grad_norm=threshold)
        for logical_batch in engine.batches(docs, 24, packing=Packing(rows=2, tokens=64), steps=1):
            for batch in logical_batch:
                loss(model(*inputs(batch)), batch).backward()
            engine.privatize()
        engine.detach()
        return {name: len(docs) * grad for name, grad in gradients_of(model).items()}

    def token_mean(logits, batch):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    short, long = [torch.tensor([1, 2, 3])] * 18, [torch.full((T,), 5)]
    for loss, low, high in (
        (lambda logits, batch: unit_losses(logits, batch, 24).mean(), 0, 1),
        (token_mean, 4.3, 4.4),
    ):
        threshold = norm(total(short, 1e9, loss)) / len(short)
        few, more = total(short, threshold, loss), total(short + long, threshold, loss)
        assert low <= norm({name: more[name] - few[name] for name in few}) / threshold <= high


def test_a_token_mean_loss_of_the_model_is_caught():
    class WithLoss(LanguageModel):
        def forward(self, ids, positions, unit_ids, labels):
            logits = super().forward(ids, positions, unit_ids)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits

    model = WithLoss()
    with pytest.raises(VerificationError, match="packed_cross_entropy"):
        step(model, documents(), 1.0, forward=lambda batch: model(*inputs(batch), batch["labels"])[1])


@pytest.mark.parametrize(
    ("unit_ids", "units", "match"),
    [
        ([[0, 0, 1, 1], [1, 2, 2, -1]], 3, "Unit 1 straddles rows 0 and 1"),
        ([[0, 0, 1, 0], [2, 2, 2, -1]], 3, "unit 0 are not side by side in row 0"),
        ([[0, 0, 1, 1], [2, 2, 2, -1]], 2, "ids up to 2, and there are units=2"),
        ([[0, 0], [1, 1]], 2, "rows and tokens cannot be told apart"),
        ([[0.0, 1.0]], 2, "whole numbers"),
    ],
)
def test_unit_ids_that_are_not_runs_of_one_row(unit_ids, units, match):
    engine = noise_free_engine(LanguageModel(), batch_size=3)
    with pytest.raises(BatchLayoutError, match=match):
        engine.packed(torch.tensor(unit_ids), units)
    engine.detach()


@pytest.mark.parametrize(
    ("docs", "options", "error", "match"),
    [
        (documents(), {"packing": "rows"}, ConfigurationError, "pass a dpshard.Packing"),
        (documents(), {"units": 1}, ConfigurationError, "at least rows=2"),
        (documents(), {"units": None}, ConfigurationError, "largest number of units"),
        (documents(), {"packing": Packing(rows=2, tokens=T, lengths=[3])}, DataError, "1 lengths for 8 documents"),
        ([*documents(), torch.zeros(0, dtype=torch.long)], {}, DataError, "Document 8 has no tokens"),
        ([{"ids": x} for x in documents()], {}, DataError, 'has no "input_ids"'),
        ([{"input_ids": x, "labels": x[1:]} for x in documents()], {}, DataError, "one value per token"),
        (documents(), {"verify": False}, ConfigurationError, "default of verify"),
        (documents(), {"rows_per_unit": 2}, ConfigurationError, "rows_per_unit"),
        (UnitDataset(documents(), range(8), 1), {}, DataError, "holds units of rows"),
    ],
    ids=[
        "not a packing",
        "few units",
        "no units",
        "lengths",
        "empty",
        "no ids",
        "unequal",
        "unverified",
        "rows of units",
        "a data set of units",
    ],
)
def test_bad_packing(docs, options, error, match):
    with pytest.raises(error, match=match):
        step(LanguageModel(), docs, 1.0, **options)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 4), (2, 0), (4, 4), (1.5, 4)])
def test_bad_sizes(rows, tokens):
    with pytest.raises(ConfigurationError, match="Packing"):
        Packing(rows=rows, tokens=tokens)


def test_wrong_lengths_are_noticed():
    lengths = [len(ids) + 1 for ids in documents()]
    with pytest.raises(DataError, match="were expected"):
        step(LanguageModel(), documents(), 1.0, packing=Packing(rows=2, tokens=T, lengths=lengths))


def test_rows_in_another_order_are_refused():
    model = LanguageModel()
    with pytest.raises(BatchLayoutError, match="in another order"):
        step(model, documents(), 1.0, forward=lambda batch: model(*(x.flip(0) for x in inputs(batch))))


def test_other_rows_than_those_handed_out():
    model = LanguageModel()
    with pytest.raises(BatchLayoutError, match="no input of LanguageModel has these rows"):
        step(model, documents(), 1.0, forward=lambda batch: model(*(x[:1] for x in inputs(batch))))


def test_engine_packed_within_packed_batches():
    model = LanguageModel()
    engine = noise_free_engine(model, batch_size=8, sample_size=8)
    for logical_batch in engine.batches(documents(), U, packing=PACKING):
        for batch in logical_batch:
            with (
                pytest.raises(LogicalBatchError, match=r"Leave engine\.packed out"),
                engine.packed(batch["unit_ids"], U),
            ):
                pass
            break
        break
    engine.detach()


@pytest.mark.parametrize("options", [{"verify": False}, {"rows_per_unit": 2}])
def test_packed_rows_need_verification_and_single_rows(options):
    engine = noise_free_engine(LanguageModel(), batch_size=8, sample_size=8, **options)
    packed = engine.packed(torch.zeros(1, 4, dtype=torch.long), 1)
    with pytest.raises(ConfigurationError, match="Packed rows need verify=True"), packed:
        pass
    engine.detach()


def test_compiled_autograd_is_refused():
    """It would leave out the nodes that clip."""
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(ConfigurationError, match=r"compiled_autograd is on"),
    ):
        step(LanguageModel(), documents(), 1.0)
