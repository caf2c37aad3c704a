"""Rows are samples by their number: loops that move, mask, replace or augment them.

On padded micro-batches such loops counted one sample up to 17.8 times. Each is refused, by an error that says what to
do, or exact; with `pad=False`, and through the interface of Opacus, those that any training may contain are exact.

Failure modes: 5 every attack on padded micro-batches.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpshard.integrations.opacus import PrivacyEngine as OpacusEngine
from dpshard.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpshard.interception import Doubts
from tests.attacks.oracle import ALLOWED, R, assert_exact_or_refused, influence, is_refused
from tests.grids import all_pairs

N, D, C, LENGTH, WORDS = 9, 3, 3, 6, 12
MICRO = 6  # 9 samples leave 3 for the second micro-batch, 8 leave 2


def mlp():
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C))


def rows(n=N, scale=20.0):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(scale * torch.randn(n, D, generator=generator), torch.arange(n) % C)


def texts(n=N):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, LENGTH + 1, (n,), generator=generator)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    return TensorDataset(ids * (torch.arange(LENGTH) < lengths[:, None]), lengths, torch.arange(n) % C)


def loop_of(body, *, micro=MICRO, **options):
    """Return a training loop of one step; `body(model, batch, is_padding)` gives the loss of a micro-batch."""

    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, micro, **options):
            for batch in logical_batch:
                body(model, batch, logical_batch.is_padding).backward()
            optimizer.step()

    return loop


def refused(body, dataset=None, build=mlp, **settings):
    return is_refused(build, loop_of(body), rows() if dataset is None else dataset, **settings)


def exact(body, dataset=None, build=mlp, *, micro=MICRO, pad=True, **settings):
    """Assert that the loop runs, and that each sample counts once, also large ones."""
    found = influence(build, loop_of(body, micro=micro, pad=pad), rows() if dataset is None else dataset, **settings)
    assert 0.5 < found <= ALLOWED
    return found


# --- rows in another order ------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """An RNN that needs packed texts, longest first."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(WORDS, 5), nn.GRU(5, 4, batch_first=True), nn.Linear(4, C)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][-1])


def packed_by_length(model, batch, _):
    ids, lengths, y = batch
    lengths, order = lengths.sort(descending=True)
    return 20 * F.cross_entropy(model(ids[order], lengths), y[order])


def shuffled(model, batch, _):
    x, y = batch
    order = torch.randperm(len(x))
    return F.cross_entropy(model(x[order]), y[order])


def sorted_by_loss(model, batch, _, *, descending=False):
    x, y = batch
    with torch.no_grad():
        order = F.cross_entropy(model(x), y, reduction="none").argsort(descending=descending, stable=True)
    return F.cross_entropy(model(x[order]), y[order])


def test_texts_packed_by_length_are_refused():
    message = refused(packed_by_length, texts(), Reader)
    assert "Sort" in message
    assert "pad=False" in message


@pytest.mark.parametrize("body", [shuffled, sorted_by_loss])
def test_rows_shuffled_or_sorted_are_refused(body):
    assert "pad=False" in refused(body)


def test_rows_sorted_by_loss_are_refused_unless_the_filler_stays_where_it_is():
    """In one of the two orders the last sample stays last, followed by its copies."""
    told = [refused(lambda *given, d=d: sorted_by_loss(*given, descending=d)) for d in (True, False)]
    assert sum(message is not None for message in told) >= 1
    for d in (True, False):
        assert_exact_or_refused(mlp, loop_of(lambda *given, d=d: sorted_by_loss(*given, descending=d)), rows())


@pytest.mark.parametrize(
    ("body", "dataset", "build"),
    [(packed_by_length, texts, Reader), (shuffled, rows, mlp), (sorted_by_loss, rows, mlp)],
)
def test_without_padding_they_are_exact(body, dataset, build):
    exact(body, dataset(), build, pad=False)


def test_flags_that_wait_on_an_accelerator_are_told_before_the_release(monkeypatch):
    def waiting(self, *, at_once):
        self._at_once, self._flags = False, []

    monkeypatch.setattr(Doubts, "__init__", waiting)
    steps = []

    def loop(model, engine, optimizer, dataset):
        try:
            loop_of(shuffled)(model, engine, optimizer, dataset)
        finally:
            steps.append(engine.step)

    assert "pad=False" in is_refused(mlp, loop, rows())
    assert is_refused(mlp, loop_of(plain), rows()) is None
    assert steps == [0]


def test_rows_sorted_where_many_are_equal_are_refused():
    """a a b and the filler b, sorted to b b a a: the last row still equals its copy."""
    x = torch.tensor([[1.0, 2, 3], [1, 2, 3], [3, 1, 2]])

    def backwards(model, batch, _):
        x, y = batch
        return F.cross_entropy(model(x.flip(0)), y.flip(0))

    message = is_refused(mlp, loop_of(backwards, micro=4), TensorDataset(x, torch.tensor([0, 1, 2])))
    assert "another order" in message


def test_labels_sorted_behind_equal_inputs_are_refused():
    """Only labels distinguish these rows, so no input shows that the filler moved."""

    def by_label(model, batch, _):
        x, y = batch
        y, order = y.sort(descending=True)
        return (torch.tensor([1.0, 5.0, 25.0])[y] * F.cross_entropy(model(x[order]), y, reduction="none")).mean()

    data = TensorDataset(torch.ones(4, D), torch.tensor([0, 1, 0, 2]))
    assert "labels are in another order" in is_refused(mlp, loop_of(by_label, micro=6), data)


def test_labels_in_another_order_than_inputs_are_refused():
    assert "labels are in another order" in refused(
        lambda model, batch, _: F.cross_entropy(model(batch[0]), batch[1].flip(0))
    )


# --- several forwards in a micro-batch ------------------------------------------------------------------------------


def views_in_two_orders(model, batch, _):
    x, y = batch
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.roll(1, 0)), y.roll(1))


def parts_in_two_orders(model, batch, _):
    x, y = batch
    hidden = torch.tanh(model[0](x))
    return F.cross_entropy(model[2](hidden), y) + F.cross_entropy(model[2](hidden.flip(0)), y.flip(0))


def encoder_then_head(model, batch, _):
    x, y = batch
    hidden = model[0](x)
    return F.cross_entropy(model[2](hidden.flip(0)), y.flip(0))


def on_a_second_loader(model, batch, _):
    x, y = batch
    unlabelled = 20 * torch.randn(x.shape)
    logits = model(unlabelled)
    return F.cross_entropy(model(x), y) + F.cross_entropy(logits, logits.argmax(1))


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("body", [views_in_two_orders, parts_in_two_orders, encoder_then_head])
def test_forwards_in_two_orders_are_refused_with_and_without_padding(body, pad):
    message = is_refused(mlp, loop_of(body, pad=pad), rows())
    assert message is not None
    assert "order" in message


def test_forwards_in_two_orders_are_refused_in_the_first_full_micro_batch():
    message = is_refused(mlp, loop_of(views_in_two_orders, micro=N), rows())
    assert "different orders" in message


def test_rows_of_a_second_loader_are_refused_where_there_is_padding():
    assert "other data" in refused(on_a_second_loader)


# --- padding masked by the loop -------------------------------------------------------------------------------------


def mean_of_samples(model, batch, is_padding):
    x, y = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses[~is_padding].mean() if not is_padding.all() else 0 * losses.sum()


def weighted_by_samples(model, batch, is_padding):
    x, y = batch
    weight = (~is_padding).float()
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum().clamp(min=1)


def weighted_nearly_to_nothing(model, batch, is_padding):
    x, y = batch
    weight = torch.where(is_padding, 1e-3, 1.0)
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def dropout():
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, C))


@pytest.mark.parametrize(
    ("style", "body", "build"),
    all_pairs(["all-layer", "layer-wise"], [mean_of_samples, weighted_by_samples], [mlp, dropout]),
)
def test_a_mean_over_the_samples_is_refused(build, body, style):
    message = refused(body, rows(scale=1.0), build, clipping_style=style, clipping_fn="automatic")
    assert "loss.mean()" in message


def test_padding_weighted_nearly_to_nothing_is_refused():
    assert "weighs a row by its position" in refused(weighted_nearly_to_nothing)


def test_a_sum_over_the_samples_is_exact():
    def body(model, batch, is_padding):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")[~is_padding].sum()

    exact(body, loss_reduction="sum")


# --- rows changed by the loop ---------------------------------------------------------------------------------------


def augmented(model, batch, _):
    x, y = batch
    return F.cross_entropy(model(x + torch.randn(x.shape)), y)


def test_rows_augmented_in_the_loop_are_refused_where_there_is_padding():
    assert "pad=False" in refused(augmented)


def test_rows_augmented_in_the_loop_run_without_padding():
    assert is_refused(mlp, loop_of(augmented, pad=False), rows()) is None


def test_fixed_augmentations_are_exact_with_and_without_padding():
    def mirrored(model, batch, _):
        x, y = batch
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(1)), y)

    for pad in (True, False):
        exact(mirrored, pad=pad)


# --- the interface of Opacus ----------------------------------------------------------------------------------------


def opacus_update(dataset, micro):
    """Return the clipped sum of an Opacus script that sorts each physical batch by length."""
    torch.manual_seed(0)
    model, n = Reader(), len(dataset)
    before = [p.detach().double().clone() for p in model.parameters()]
    loader = DataLoader(dataset, batch_size=n)
    made = OpacusEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=R,
    )
    private, optimizer, loader = made
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=micro, optimizer=optimizer) as small:
        for batch in small:
            optimizer.zero_grad()
            packed_by_length(private, batch, None).backward()
            optimizer.step()
    private.cleanup()
    return torch.cat(
        [(n * (b - p.detach().double())).flatten() for b, p in zip(before, model.parameters(), strict=True)]
    )


@pytest.mark.filterwarnings("ignore")
def test_a_script_for_opacus_that_sorts_is_exact():
    data = texts()
    whole = opacus_update(data, MICRO)
    for i in range(N):
        rest = torch.utils.data.Subset(data, [j for j in range(N) if j != i])
        assert (whole - opacus_update(rest, MICRO)).norm() <= ALLOWED * R


# --- honest look-alikes ---------------------------------------------------------------------------------------------


def plain(model, batch, _):
    x, y = batch
    return F.cross_entropy(model(x), y)


class Pairs(Dataset):
    """Samples as dicts of half-precision numbers and integers."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = rows(n=N)[i]
        return {"x": x.bfloat16(), "bucket": torch.tensor([i % 2]), "y": y}


@pytest.mark.parametrize(("micro", "build", "reduction"), all_pairs([2, 4, 16], [mlp, dropout], ["mean", "sum"]))
def test_honest_loops_run(reduction, build, micro):
    def body(model, batch, _):
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    assert (
        is_refused(build, loop_of(body, micro=micro), rows(), loss_reduction=reduction, clipping_style="layer-wise")
        is None
    )


def test_equal_rows_with_other_labels_are_exact():
    x = torch.tensor([[1.0, 2, 3], [3, 1, 2]]).repeat(5, 1)[:N]
    exact(plain, TensorDataset(20 * x, torch.arange(N) % C))


def test_equal_inputs_throughout_are_exact():
    exact(plain, TensorDataset(torch.full((N, D), 20.0), torch.arange(N) % C))


def test_gradients_that_are_zero_are_no_mask():
    """Only the last sample is beyond the margin, or only the others are."""
    for last in (1.0, -1.0):
        y = torch.full((N,), -last)
        y[-1] = last
        hinge = lambda model, batch, _: F.relu(0.5 - batch[1] * model(batch[0])[:, 0]).mean()  # noqa: E731
        for build in (mlp, dropout):
            assert is_refused(build, loop_of(hinge), TensorDataset(rows(scale=1.0).tensors[0], y)) is None


def test_nan_in_a_sample_is_a_copy_too():
    x, y = rows().tensors
    x = x.clone()
    x[-1, 0] = torch.nan
    assert is_refused(mlp, loop_of(plain), TensorDataset(x, y)) is None


def test_dicts_of_bfloat16_and_integers_run():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.buckets, self.body = nn.Embedding(2, D), mlp()

        def forward(self, x, bucket):
            return self.body(x.float() + self.buckets(bucket[:, 0]))

    def body(model, batch, _):
        return F.cross_entropy(model(x=batch["x"], bucket=batch["bucket"]), batch["y"])

    assert is_refused(Model, loop_of(body), Pairs()) is None


def test_outputs_in_another_order_are_exact():
    """Loss and labels are permuted alike after the model: autograd brings every row back."""

    def body(model, batch, _):
        x, y = batch
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x)[order], y[order])

    exact(body)


def test_time_steps_that_meet_by_chance_are_no_reordering():
    """A part of the model is called step by step on few words, which small micro-batches often repeat."""

    class Stepwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cell, self.head = nn.Embedding(3, 4), nn.GRUCell(4, 4), nn.Linear(4, C)

        def forward(self, ids):
            raise NotImplementedError

    def body(model, batch, _):
        ids, y = batch
        state = torch.zeros(len(ids), 4)
        for t in range(ids.shape[1]):
            state = model.cell(model.words(ids[:, t]), state)
        return F.cross_entropy(model.head(state), y)

    ids = torch.randint(0, 3, (N, 12), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(ids, torch.arange(N) % C)
    for micro in (2, 3, 5):
        assert is_refused(Stepwise, loop_of(body, micro=micro), data) is None


def test_a_part_that_drops_out_before_another_runs():
    """Its outputs for padding are not copies, although no row moved."""

    def body(model, batch, _):
        x, y = batch
        return F.cross_entropy(model[1](model[0](x)), y)

    def build():
        return nn.Sequential(nn.Sequential(nn.Linear(D, 5), nn.Dropout(0.5)), nn.Linear(5, C))

    assert is_refused(build, loop_of(body), rows()) is None


# --- rows that were handed out, in two rows or in none --------------------------------------------------------------


def corrupt_rows_replaced(model, batch, _):
    x, y = batch[0].clone(), batch[1].clone()
    bad, good = x.norm(dim=1) < 1, int(x.norm(dim=1).argmax())
    x[bad], y[bad] = x[good].clone(), y[good].clone()
    return F.cross_entropy(model(x), y)


def distinct_rows_repeated(model, batch, _):
    x = torch.unique(batch[0], dim=0)
    x = x[torch.arange(len(batch[0])) % len(x)]
    return F.cross_entropy(model(x), torch.arange(len(x)) % C)


def with_odd_rows():
    x, y = rows().tensors
    x[2] *= 1e-3
    x[5] = x[4]
    return TensorDataset(x, y)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("body", [corrupt_rows_replaced, distinct_rows_repeated])
def test_a_sample_in_two_rows_is_refused(body, pad):
    message = is_refused(mlp, loop_of(body, pad=pad), with_odd_rows())
    assert "in two rows" in message


def test_a_row_that_was_repeated_is_told_before_the_release(monkeypatch):
    begin = Doubts.__init__
    monkeypatch.setattr(Doubts, "__init__", lambda self, *, at_once: begin(self, at_once=False))
    message = is_refused(mlp, loop_of(corrupt_rows_replaced, pad=False), with_odd_rows())
    assert "in two rows" in message


class Tagger(nn.Linear):
    """Tags every position; given [positions, samples], it mistakes positions for samples."""

    def __init__(self):
        super().__init__(D, C)


def time_first(model, batch, _):
    x, y = batch
    return F.cross_entropy(model(x.transpose(0, 1)).flatten(0, 1), y.repeat(len(x)))


def cubes(n=12):
    x = torch.randn(n, MICRO, D, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, torch.arange(n) % C)


def test_positions_before_samples_are_refused():
    assert "dpshard took positions for samples" in refused(time_first, cubes(), Tagger)


@pytest.mark.parametrize(
    ("body", "dataset", "build"),
    [
        (lambda m, b, _: 9 * F.cross_entropy(m(b[0] / b[0].norm(dim=1, keepdim=True)), b[1]), with_odd_rows, mlp),
        (lambda m, b, _: F.cross_entropy(m(b[0].clone()), b[1]), with_odd_rows, mlp),
        (lambda m, b, _: 9 * F.cross_entropy(m((b[0] > 0).float() - 0.5), b[1]), rows, mlp),
        (lambda m, b, _: 9 * F.cross_entropy(m(b[0].clamp(-1, 1)), b[1]), rows, mlp),
        (lambda m, b, _: 9 * F.cross_entropy(m(b[0] * torch.tensor([1.0, 0, 0])), b[1]), rows, mlp),
        (lambda m, b, _: F.cross_entropy(m(b[0]), b[1]) + F.cross_entropy(m(b[0].flip(1)), b[1]), rows, mlp),
    ],
)
def test_rows_that_are_equal_by_themselves_are_exact(body, dataset, build):
    exact(body, dataset(), build)


def test_categories_that_meet_by_chance_are_exact():
    x = torch.randint(0, 2, (N, D), generator=torch.Generator().manual_seed(5)).float()
    exact(
        lambda m, b, _: 9 * F.cross_entropy(m(b[0] * torch.tensor([1.0, 1, 0])), b[1]),
        TensorDataset(x, torch.arange(N) % C),
    )
