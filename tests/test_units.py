"""Units of several rows: one gradient, one coefficient, one contribution in every mode; against a float64 oracle."""

import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import QuantileTracking, UnitDataset, augment
from dpshard.audit import audit_releases, audit_steps
from dpshard.clipping.groups import STYLES
from dpshard.config import CLIPPING_MODES
from dpshard.errors import (
    BatchLayoutError,
    CheckpointError,
    ConfigurationError,
    DataError,
    LogicalBatchError,
    VerificationError,
)
from dpshard.sampling import load, plan_steps
from tests.attacks.oracle import ALLOWED, clipped_sum, influence
from tests.networks import Network, sentences
from tests.oracle import (
    TOLERANCE,
    clipped_mean,
    noise_free_engine,
    norm,
    private_step,
    randn,
    relative_error,
)

M = 4
"""Units."""


def per_unit_gradients(model, data, K, loss):
    """The gradient of each unit's own loss: of its K rows together, alone."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for i in range(0, len(data[0]), K):
        x, *rest = (rows[i : i + K] for rows in data)
        found.append(dict(zip(names, torch.autograd.grad(loss(model(x), *rest), parameters), strict=True)))
    return found


def threshold(per_unit):
    """A norm that clips about half of the units."""
    return sorted(norm(g) for g in per_unit)[len(per_unit) // 2] * 0.999


def assert_units_exact(build, data, K, loss, *, groups=None, **options):
    per_unit = per_unit_gradients(build(), data, K, loss)
    R = threshold(per_unit)
    expected = clipped_mean(per_unit, max_grad_norm=R, batch_size=len(per_unit), groups=groups)
    options = {"batch_size": len(per_unit), "max_grad_norm": R, "rows_per_unit": K, **options}
    assert relative_error(private_step(build(), data, loss, **options), expected) <= TOLERANCE


class Images(nn.Module):
    """Convolutions and group norm, as De et al. (2022) train them on several augmentations of a picture."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.head(self.second(F.relu(self.norm(self.first(x)))).mean((2, 3)))


class Sequences(nn.Module):
    """An LSTM, whose inner tensors have the rows second, and a learned vector that is repeated for all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Parameter(torch.randn(1, 1, 5))
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        x = torch.cat([self.start.repeat(len(x), 1, 1), x], 1)
        return self.head(self.lstm(x)[0].mean(1))


class Pairs(nn.Module):
    """A head that sees both rows of a unit: rows may meet in the model, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 4), nn.Linear(8, 1)
        self.double()

    def forward(self, x):
        return self.head(self.body(x).tanh().view(len(x) // 2, 8))


def contrastive(K):
    def loss(output, *_):
        """A loss that couples the rows of a unit: each row against the unit's mean."""
        units = output.view(-1, K, output.shape[-1])
        return F.softplus((units * units.mean(1, keepdim=True)).sum(-1)).mean()

    return loss


@pytest.mark.parametrize(
    ("mode", "K"), [*((mode, 3) for mode in CLIPPING_MODES), ("auto", 1), ("auto", 16), ("bk", 16)]
)
def test_all_modes(mode, K):
    assert_units_exact(Network, sentences(M * K), K, F.cross_entropy, clipping_mode=mode, verify=mode == "auto")


@pytest.mark.parametrize("style", ["layer-wise", "block-wise", "param-wise"])
def test_all_styles(style):
    names = [name for name, _ in Network().named_parameters()]
    label = {
        "layer-wise": lambda name: name.rpartition(".")[0],
        "block-wise": lambda name: name[: len("blocks.0.")] if name.startswith("blocks.") else "rest",
        "param-wise": lambda name: name,
    }[style]
    groups = {}
    for name in names:
        groups.setdefault(label(name), []).append(name)
    assert_units_exact(
        Network, sentences(M * 3), 3, F.cross_entropy, groups=list(groups.values()), clipping_style=style
    )


@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
@pytest.mark.parametrize(("build", "shape", "K"), [(Images, (2, 6, 6), 3), (Sequences, (4, 5), 3), (Pairs, (5,), 2)])
def test_models(build, shape, K, mode):
    def loss(output):
        return (output.sin() * torch.linspace(0.5, 1.5, output.shape[1], dtype=output.dtype)).sum(1).mean()

    assert_units_exact(build, (randn(M * K, *shape),), K, loss, clipping_mode=mode)


def test_a_loss_may_couple_the_rows_of_a_unit():
    assert_units_exact(Images, (randn(M * 3, 2, 6, 6),), 3, contrastive(3))


def test_a_sum_over_rows():
    """The unit's loss is the mean of its rows' losses, whatever the reduction."""
    data, K = sentences(M * 3), 3
    per_unit = per_unit_gradients(Network(), data, K, F.cross_entropy)
    expected = clipped_mean(per_unit, max_grad_norm=threshold(per_unit), batch_size=M)

    def total(scores, y):
        return F.cross_entropy(scores, y, reduction="sum")

    options = {"loss_reduction": "sum", "max_grad_norm": threshold(per_unit), "rows_per_unit": K, "batch_size": M}
    assert relative_error(private_step(Network(), data, total, **options), expected) <= TOLERANCE


@pytest.mark.parametrize("reentrant", [False, None])
def test_micro_batches_and_checkpointing(reentrant):
    build = lambda: Network(reentrant=reentrant)  # noqa: E731
    assert_units_exact(build, sentences(M * 3), 3, F.cross_entropy, micro_batch_sizes=[3, 9])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled():
    torch._dynamo.reset()
    data, K = sentences(M * 3), 3
    per_unit = per_unit_gradients(Network(), data, K, F.cross_entropy)
    R = threshold(per_unit)
    model = Network(blocks=1)
    expected = clipped_mean(per_unit_gradients(model, data, K, F.cross_entropy), max_grad_norm=R, batch_size=M)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    update = private_step(model, data, F.cross_entropy, rows_per_unit=K, batch_size=M, max_grad_norm=R)
    assert relative_error(update, expected) <= TOLERANCE


EVERY_WAY = {
    **{mode: {"clipping_mode": mode} for mode in CLIPPING_MODES},
    **{style: {"clipping_style": style} for style in STYLES},
    "layer-wise ghost": {"clipping_style": "layer-wise", "clipping_mode": "ghost"},
    "automatic": {"clipping_fn": "automatic"},
    "adaptive": {"adaptive_clipping": QuantileTracking(learning_rate=0.5)},
}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_equal_rows_count_as_one(way):
    """K identical rows give the sum of K = 1."""
    ids, y = sentences(M)
    settings = {**EVERY_WAY[way], "max_grad_norm": 30.0, "verify": way == "auto"}
    one = clipped_sum(Network, loop_in(2), TensorDataset(ids, y), **settings)
    for K in (3, 16):
        equal = TensorDataset(*(x.unsqueeze(1).repeat_interleave(K, 1) for x in (ids, y)))
        found = clipped_sum(Network, loop_in(2), equal, rows_per_unit=K, **settings)
        assert relative_error(found, one) <= TOLERANCE


# --- engine.batches --------------------------------------------------------------------------------------------------


def units_of(n, K):
    """A data set of n units: ids [n, K, T] and classes [n, K]."""
    ids, y = sentences(n * K)
    return TensorDataset(ids.view(n, K, -1), y.view(n, K))


def loop_in(micro_batch_size, **options):
    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, micro_batch_size, **options):
            for ids, y in logical_batch:
                assert len(ids) == micro_batch_size * engine.mechanism.rows_per_unit == len(logical_batch.is_padding)
                losses = F.cross_entropy(model(ids), y, reduction="none")
                engine.record_loss(losses.detach())
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


class Items(torch.utils.data.Dataset):
    """The same units as dicts of arrays and lists, for a collate_fn of rows."""

    def __init__(self, units):
        self.units = units

    def __len__(self):
        return len(self.units)

    def __getitem__(self, i):
        ids, y = self.units[i]
        return {"ids": ids.numpy(), "y": y.tolist()}


def collated(rows):
    return torch.stack([torch.as_tensor(row["ids"]) for row in rows]), torch.tensor([row["y"] for row in rows])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_batches_hand_out_the_rows_of_whole_units(micro_batch_size):
    """Padding included: 4 units in micro-batches of 3."""
    K, units = 3, units_of(M, 3)
    ids, y = units.tensors[0].flatten(0, 1), units.tensors[1].flatten()
    per_unit = per_unit_gradients(Network(), (ids, y), K, F.cross_entropy)
    R = threshold(per_unit)
    expected = clipped_mean(per_unit, max_grad_norm=R, batch_size=1)
    settings = {"rows_per_unit": K, "max_grad_norm": R}
    loop = loop_in(micro_batch_size)
    assert relative_error(clipped_sum(Network, loop, units, **settings), expected) <= TOLERANCE
    loop = loop_in(micro_batch_size, collate_fn=collated)
    assert relative_error(clipped_sum(Network, loop, Items(units), **settings), expected) <= TOLERANCE


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_unit_moves_the_sum_by_R_at_most(way):
    """Neighbouring data sets differ by a unit of rows that pull in one direction."""
    ids, y = sentences(2)
    units = TensorDataset(ids[:, None].repeat(2, 3, 1), y[:, None].repeat(2, 3))
    build = functools.partial(Network, blocks=1)
    settings = {**EVERY_WAY[way], "verify": way == "auto"}
    found = influence(build, loop_in(3), units, left_out=[3], rows_per_unit=3, **settings)
    assert 0.9 < found <= ALLOWED


def test_metrics_are_of_units():
    K, units = 3, units_of(M, 3)
    norms = sorted(
        norm(g)
        for g in per_unit_gradients(
            Network(), (units.tensors[0].flatten(0, 1), units.tensors[1].flatten()), K, F.cross_entropy
        )
    )
    engine = noise_free_engine(model := Network(), batch_size=M, sample_size=M, rows_per_unit=K, verify=False)
    loop_in(2)(model, engine, torch.optim.SGD(model.parameters(), lr=0.0), units)
    assert engine.metrics()["grad_norm_max/all-layer"] == pytest.approx(norms[-1])
    assert engine.metrics()["realised_batch_size"] == M


def test_thresholds_of_equal_rows_follow_those_of_one():
    """K identical rows are one: so are the norms that the thresholds follow, and the number of units."""
    found = []
    for K in (1, 3):
        ids, y = sentences(M)
        rows = [t if K == 1 else torch.stack([t] * K, 1) for t in (ids, y)]
        engine = noise_free_engine(
            model := Network(),
            batch_size=M,
            sample_size=M,
            steps=3,
            rows_per_unit=K,
            max_grad_norm=0.1,
            adaptive_clipping=QuantileTracking(learning_rate=0.5),
        )
        engine._secret = bytes(range(32))
        loop_in(2)(model, engine, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(*rows))
        found.append(engine.thresholds["all-layer"])
    assert found[0] != 0.1
    assert found[1] == pytest.approx(found[0], rel=1e-9)


# --- what units must be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1.5, True, "2"])
def test_rows_per_unit_is_a_count(rows):
    with pytest.raises(ConfigurationError, match="rows_per_unit"):
        noise_free_engine(Network(), batch_size=2, rows_per_unit=rows)


def test_rows_that_are_no_whole_units_are_refused():
    with pytest.raises(BatchLayoutError, match=r"10 rows, which is not a multiple of rows_per_unit=3"):
        private_step(Network(), sentences(10), F.cross_entropy, rows_per_unit=3, batch_size=3)


@pytest.mark.parametrize(
    "dataset",
    [
        units_of(M, 2),
        TensorDataset(torch.zeros(M)),
        [{"ids": torch.zeros(3, 4), "y": 1}] * M,
        [(torch.zeros(3, 4), [1, 2])] * M,
        [tuple(x[3 * i :][:rows] for x in sentences(12)) for i, rows in enumerate((3, 3, 2, 3))],
    ],
)
def test_items_that_are_no_units_are_refused(dataset):
    with pytest.raises(DataError, match="rows_per_unit=3"):
        clipped_sum(Network, loop_in(2), dataset, rows_per_unit=3)


def across(output, *_):
    """A loss that couples the rows of neighbouring units."""
    return F.softplus((output[:-1] * output[1:]).sum(-1)).mean()


class Returns(nn.Module):
    """A model that returns its loss."""

    def __init__(self, body, loss):
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, x):
        return self.loss(self.body(x))


def test_verification_compares_units():
    x = randn(M * 3, 2, 6, 6)
    engine = noise_free_engine(Returns(Images(), contrastive(3)), batch_size=M, rows_per_unit=3)
    engine.verify(x)
    engine.detach()
    engine = noise_free_engine(Returns(Images(), across), batch_size=M, rows_per_unit=3)
    with pytest.raises(VerificationError):
        engine.verify(x)
    engine.detach()
    engine = noise_free_engine(Images(), batch_size=M, rows_per_unit=3)
    y = torch.randint(3, (M * 3,))
    engine.verify(x, loss_fn=F.cross_entropy, targets=y)
    with pytest.raises(VerificationError):
        engine.verify(x, loss_fn=lambda output, y: F.cross_entropy(output, y) + across(output), targets=y)
    engine.detach()


def test_a_model_that_mixes_units_is_refused():
    class Mixes(Images):
        def forward(self, x):
            y = super().forward(x)
            return y - y.mean(0).detach()

    with pytest.raises(VerificationError):
        private_step(Mixes(), (randn(M * 3, 2, 6, 6),), rows_per_unit=3, batch_size=M)


def in_order(rows):
    """A loop that hands the rows to the model in another order."""

    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, 2):
            for ids, y in logical_batch:
                order = rows(len(ids))
                F.cross_entropy(model(ids[order]), y[order]).backward()
            optimizer.step()

    return loop


def halves(n):
    """The first rows of all units, then the second ones, as trainers of preferences join answers."""
    return torch.arange(n).view(-1, 2).t().flatten()


def rolled(n):
    """Each row one place on: every unit gets a row of another."""
    return torch.arange(n).roll(1)


@pytest.mark.parametrize("order", [halves, rolled])
@pytest.mark.parametrize("units", [2, 3])
def test_rows_of_a_unit_that_are_no_neighbours_are_refused(units, order):
    """On full micro-batches of 2 units, too."""
    with pytest.raises(LogicalBatchError, match=r"rows of a unit adjacent|copies"):
        clipped_sum(Network, in_order(order), units_of(units, 2), rows_per_unit=2, verify=False)


def turned(n):
    """The rows of each unit in reverse."""
    return torch.arange(n).view(-1, 3).flip(1).flatten()


def turned_one_by_one(n):
    """The rows of each unit in an order of its own."""
    return torch.cat([3 * unit + torch.arange(3).roll(unit) for unit in range(n // 3)])


@pytest.mark.parametrize("order", [turned, turned_one_by_one])
@pytest.mark.parametrize("units", [2, 3])
def test_rows_of_a_unit_may_change_places(units, order):
    """In padded micro-batches, too; the unit's own rows stay together."""
    options = {"rows_per_unit": 3, "max_grad_norm": 0.5}
    expected = clipped_sum(Network, loop_in(2), units_of(units, 3), **options)
    assert relative_error(clipped_sum(Network, in_order(order), units_of(units, 3), **options), expected) <= TOLERANCE


@pytest.mark.parametrize("whole", [True, False])
def test_padding_units_that_get_other_rows_are_refused_in_any_order(whole):
    """The unit and its copies change places, or one row of each."""

    def exchanged(n):
        order = turned_one_by_one(n)
        if n == 6 and whole:
            return order.roll(3)
        order[[0, 3]] = order[[3, 0]]
        return order

    with pytest.raises(LogicalBatchError, match=r"copies of its last sample|clipped as one"):
        clipped_sum(Network, in_order(exchanged), units_of(3, 3), rows_per_unit=3, verify=False)


def test_units_that_lose_a_row_to_each_other_are_refused_after_a_reorder():
    """Two units swap one row each, among units whose rows change places as they may."""

    def swapped(n):
        order = turned(n)
        order[[0, 3]] = order[[3, 0]]
        return order

    with pytest.raises(LogicalBatchError, match="clipped as one"):
        clipped_sum(Network, in_order(swapped), units_of(2, 3), rows_per_unit=3, verify=False)


def test_loops_that_change_the_order_of_rows_are_refused():
    engine = noise_free_engine(Network(), batch_size=2, sample_size=4, rows_per_unit=2)
    with pytest.raises(ConfigurationError, match="side by side"):
        engine.batches(units_of(4, 2), 2, pad=False)
    engine.detach()


def test_the_statement_names_the_unit():
    engine = noise_free_engine(Network(), batch_size=2, rows_per_unit=8, noise_multiplier=1.0)
    assert "for one unit of up to 8 rows, of N = 1000" in engine.statement()
    state = engine.state_dict()
    assert state["mechanism"]["rows_per_unit"] == 8
    engine.detach()
    other = noise_free_engine(Network(), batch_size=2, noise_multiplier=1.0)
    with pytest.raises(CheckpointError, match="rows_per_unit"):
        other.load_state_dict(state)
    assert "for one sample of N = 1000" in other.statement()
    other.detach()


# --- UnitDataset -----------------------------------------------------------------------------------------------------

IDS = ["ann", "bob", "ann", "cem", "bob", "ann", "ann", "dee", "bob", "ann"]
"""ann has 5 rows, bob 3, cem and dee one each."""


def weighted(model, engine, optimizer, dataset):
    for logical_batch in engine.batches(dataset, 2):
        for ids, y, weight in logical_batch:
            (F.cross_entropy(model(ids), y, reduction="none") * weight).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_unit_of_fewer_rows_is_the_mean_of_its_rows():
    ids, y = sentences(len(IDS))
    rows = TensorDataset(ids, y)
    units = UnitDataset(rows, IDS, rows_per_unit=5)
    assert list(units.ids) == ["ann", "bob", "cem", "dee"]
    per_unit = []
    for name in units.ids:
        own = [i for i, x in enumerate(IDS) if x == name]
        per_unit += per_unit_gradients(Network(), (ids[own], y[own]), len(own), F.cross_entropy)
    R = threshold(per_unit)
    found = clipped_sum(Network, weighted, units, rows_per_unit=5, max_grad_norm=R)
    # Weights are float32, and 5 / 3 is no such number.
    assert relative_error(found, clipped_mean(per_unit, max_grad_norm=R, batch_size=1)) <= 1e-6


def test_more_rows_are_drawn_anew_in_every_step_and_by_the_key():
    units = UnitDataset(list(range(len(IDS))), IDS, rows_per_unit=2)
    keys = [bytes([i]) * 32 for i in range(200)]
    draws = [[row for row, _ in units.draw(0, key).rows] for key in keys]
    assert draws == [[row for row, _ in units.draw(0, key).rows] for key in keys]
    assert all(len(set(draw)) == 2 for draw in draws)
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=10)[[0, 2, 5, 6, 9]]
    assert counts.sum() == 400
    assert ((counts - 80).abs() < 40).all()  # five standard deviations of Binomial(200, 2 / 5): 35
    assert [float(w) for _, w in units.draw(2, keys[0]).rows] == [2.0, 0.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_shows_other_rows_in_every_step(workers):
    units = UnitDataset(list(range(40)), [0] * 20 + [1] * 20, rows_per_unit=3)
    plans = list(plan_steps(_Everyone(), bytes(32), range(3), 2, rows_per_unit=3))
    loaded = load(units, plans, sample_size=2, rows_per_unit=3, num_workers=workers)
    seen = [rows.tolist() for _, (rows, weight) in loaded if weight.tolist() == [1] * 6]
    assert len(seen) == len({tuple(rows) for rows in seen}) == 3
    assert all(max(rows[:3]) < 20 <= min(rows[3:]) for rows in seen)


class _Everyone:
    def draw(self, step):
        return np.arange(2)


def test_strings_dicts_and_one_row_a_step():
    rows = [{"text": name, "ids": torch.arange(4)} for name in IDS]
    units = UnitDataset(rows, IDS, rows_per_unit=1)
    plans = list(plan_steps(_Everyone(), bytes(32), range(1), 2))
    ((_, data),) = load(units, plans, sample_size=4)
    assert data["text"] == ["ann", "bob"]
    assert data["row_weight"].tolist() == [1, 1]
    assert data["ids"].shape == (2, 4)


@pytest.mark.parametrize(
    ("rows", "ids", "message"),
    [
        (range(3), [1, 2], "one id for each row"),
        (range(3), [[1], [2], [3]], "one id for each row"),
        (range(3), [1.0, float("nan"), 2.0], "Row 1 has no unit id"),
        (range(3), ["a", None, "b"], "Row 1 has no unit id"),
        ([], [], "empty"),
    ],
)
def test_ids_that_do_not_match_are_refused(rows, ids, message):
    with pytest.raises(DataError, match=message):
        UnitDataset(rows, ids, rows_per_unit=2)


def test_an_engine_of_other_rows_refuses_a_unit_dataset():
    units = UnitDataset(TensorDataset(*sentences(len(IDS))), IDS, rows_per_unit=2)
    with pytest.raises(DataError, match="units of up to 2 rows, and the engine rows_per_unit="):
        clipped_sum(Network, weighted, units, rows_per_unit=5)


def test_units_of_ids_of_several_types():
    units = UnitDataset(range(4), np.array([1, "1", 1, (2,)], dtype=object), rows_per_unit=2)
    assert sorted([row for row, _ in units[i].rows] for i in range(len(units))) == [[0, 2], [1, 1], [3, 3]]


def test_equal_ids_of_several_types_are_one_unit():
    """A table that is joined of two has ints beside floats; a user in two units would count twice."""
    ids = np.array([1, np.int64(1), 1.0, "a", np.str_("a")], dtype=object)
    assert len(UnitDataset(range(5), ids, rows_per_unit=2)) == 2
    with pytest.raises(DataError, match="cannot be compared"):
        UnitDataset(range(2), np.array([[1], None], dtype=object)[[0, 0]], rows_per_unit=2)


def test_an_ordinary_loader_does_not_take_units_for_rows():
    """It would make micro-batches of one row each of several units."""
    loader = torch.utils.data.DataLoader(UnitDataset(range(8), [0, 0, 1, 1, 2, 2, 3, 3], rows_per_unit=2), 4)
    with pytest.raises(TypeError, match="UnitRows"):
        next(iter(loader))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_collate_fn_that_sorts_the_rows_of_several_units_is_refused(weighted):
    """By length, say: rows of several units would be clipped as one."""

    def by_sum(rows):
        ids, y = zip(*sorted(rows, key=lambda row: int(row[0].sum())), strict=True)
        return torch.stack(ids), torch.stack(y), *([torch.ones(len(y))] if weighted else [])

    def in_place(rows):
        ids, y = zip(*rows, strict=True)
        return torch.stack(ids), torch.stack(y), *([torch.ones(len(y))] if weighted else [])

    class Units(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return units_of(4, 3)[i]

    def first(collate_fn):
        engine = noise_free_engine(Network(), batch_size=4, sample_size=4, rows_per_unit=3)
        batches = engine.batches(Units(), 4, collate_fn=collate_fn)
        return next(iter(next(batches)))

    assert len(first(in_place)[0]) == 12
    with pytest.raises(VerificationError, match="collate_fn reorders the rows of units"):
        first(by_sum)


def apart(x):
    """First rows of all units, then second ones."""
    return torch.cat([x[0::2], x[1::2]])


def side_by_side(x):
    """Undo `apart`."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


class Typed(nn.Module):
    """As BERT: types of tokens, zeros in most texts; they may be looked up in another order."""

    def __init__(self, *, regroups=False, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types = nn.Embedding(7, 4), nn.Embedding(2, 4, padding_idx=padding_idx)
        self.head, self.regroups = nn.Linear(4, 3), regroups
        self.double()

    def forward(self, ids, types=None):
        types = ids.new_zeros(1, 1).expand_as(ids) if types is None else types
        found = side_by_side(self.types(apart(types))) if self.regroups else self.types(types)
        return self.head((self.words(ids) + found).tanh().mean(1))


@pytest.mark.parametrize("given", [True, False])
def test_types_of_tokens_may_all_be_zero(given):
    """The order of equal ids is that of the inputs: verification tells by gradients."""
    ids, y = torch.randint(7, (M * 2, 5)), torch.arange(M * 2) % 3
    data = (torch.stack([ids, torch.zeros_like(ids)], 1) if given else ids), y

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Typed()

        def forward(self, x):
            return self.body(x[:, 0], x[:, 1]) if given else self.body(x)

    assert_units_exact(Split, data, 2, F.cross_entropy)


@pytest.mark.parametrize(("padding_idx", "error"), [(None, VerificationError), (0, BatchLayoutError)])
def test_types_that_are_looked_up_in_another_order_are_refused(padding_idx, error):
    """At once; where the zeros are padding they have no gradient, and nothing tells."""
    data = torch.randint(7, (M * 2, 5)), torch.arange(M * 2) % 3
    with pytest.raises(error):
        private_step(
            Typed(regroups=True, padding_idx=padding_idx), data, F.cross_entropy, rows_per_unit=2, batch_size=M
        )


@pytest.mark.parametrize("first", ["equal", "zero"])
@pytest.mark.parametrize(("verify", "error"), [(True, VerificationError), (False, BatchLayoutError)])
def test_equal_rows_do_not_hide_another_order(first, verify, error):
    """A first micro-batch of equal rows leaves no wrong order behind: by gradients, or not at all."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

        def forward(self, x):
            return side_by_side(self.head(self.first(apart(x)).mean(1)))

    ids = torch.randint(7, (M * 2, 5)) if first == "zero" else torch.arange(5).expand(M * 2, 5)
    data = ids * (first != "zero"), torch.arange(M * 2) % 3
    with pytest.raises(error):
        private_step(Halves().double(), data, F.cross_entropy, rows_per_unit=2, batch_size=M, verify=verify)


def test_rows_that_tell_no_order_are_refused_where_they_are_zeros():
    """Zeros have no gradient, so verification cannot see in which order the rows of units came to the layer."""

    class Regrouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.rare = nn.Linear(3, 2), nn.Linear(1, 2, bias=False)

        def forward(self, x):
            x = torch.cat([x[0::2], x[1::2]])
            return (self.dense(x[:, :-1]) + self.rare(x[:, -1:])).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)

    x, y = randn(8, 4), torch.arange(8) % 2
    x[:, -1] = 0
    with pytest.raises(BatchLayoutError, match="sees equal rows"):
        private_step(Regrouped().double(), (x, y), F.cross_entropy, rows_per_unit=2, batch_size=4)


def test_an_output_that_is_written_to_later_tells_its_order():
    class InPlace(Images):
        def forward(self, x):
            y = self.second(F.relu(self.norm(self.first(x))))
            z = y.mean((2, 3))
            scores = self.head(z)
            scores += 50 * z.sum(1, keepdim=True).detach()
            return scores

    assert_units_exact(InPlace, (randn(M * 3, 2, 6, 6),), 3, lambda y: y.sin().mean(), verify=False)


def test_what_does_not_know_units_refuses_them():
    x, y = sentences(6)
    for audit in (audit_steps, audit_releases):
        with pytest.raises(ConfigurationError, match="does not support units"):
            audit(Network(), x, y, lambda scores, y: F.cross_entropy(scores, y, reduction="none"), rows_per_unit=2)


# --- augment ---------------------------------------------------------------------------------------------------------


def jittered(item):
    """By all generators that a transform may draw from, in place."""
    x, y = item
    x += torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
    return x, y


def test_augmentations_are_drawn_by_the_key_and_leave_everything_else_alone():
    images = [(torch.full((2,), float(i)), i) for i in range(3)]
    units = augment(images, jittered, 4)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first, again, other = (units.draw(1, key * 32).rows for key in (b"a", b"a", b"b"))
    assert torch.equal(torch.rand(2), expected)
    values = [[float(x[0]) for x, _ in rows] for rows in (first, again, other)]
    assert values[0] == values[1]
    assert len(set(values[0] + values[2])) == 8
    assert all(1 <= value < 4 for value in values[0])
    assert [y for _, y in first] == [1] * 4
    assert [float(x[0]) for x, _ in images] == [0, 1, 2]
    assert len(units) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_replayed_step_has_the_same_augmentations(workers):
    units = augment([(torch.zeros(2), 0)] * 2, jittered, 3)

    def steps(secret):
        plans = list(plan_steps(_Everyone(), secret, range(2), 2, rows_per_unit=3))
        return [x for _, (x, _) in load(units, plans, sample_size=2, rows_per_unit=3, num_workers=workers)]

    first, again, other = steps(bytes(32)), steps(bytes(32)), steps(bytes([1] * 32))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    values = torch.cat(first + other)[:, 0]
    assert len(values.unique()) == 24


def test_a_sample_is_clipped_once_with_all_of_its_augmentations():
    """Shifted ids as augmentations, of which the transform knows the number."""
    ids, y = sentences(M)
    samples = [(ids[i], y[i]) for i in range(M)]
    shifts = iter(range(3 * M))
    units = augment(samples, lambda item: (item[0].roll(next(shifts) % 3), item[1]), 3)
    rows = torch.cat([torch.stack([x.roll(j) for j in range(3)]) for x in ids]), y.repeat_interleave(3)
    per_unit = per_unit_gradients(Network(), rows, 3, F.cross_entropy)
    R = threshold(per_unit)
    found = clipped_sum(Network, loop_in(4), units, rows_per_unit=3, max_grad_norm=R)
    assert relative_error(found, clipped_mean(per_unit, max_grad_norm=R, batch_size=1)) <= TOLERANCE


def test_augmentations_are_counted():
    with pytest.raises(ConfigurationError, match="rows_per_unit"):
        augment([1], jittered, 0)
    with pytest.raises(DataError, match="units of up to 2 rows, and the engine rows_per_unit="):
        clipped_sum(Network, loop_in(2), augment(TensorDataset(*sentences(4)), tuple, 2), rows_per_unit=3)
