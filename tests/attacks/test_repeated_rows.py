"""A row that the data set repeats is several samples: the engine tells, and a unit of all repetitions is exact."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from dpshard import PrivacyEngine, UnitDataset, augment
from dpshard.sampling import warn_of_repeats
from tests.attacks.oracle import ALLOWED, R, clipped_sum

N, D, P = 6, 3, 2
OFTEN = [0, 0, 0, 1, 2, 3, 4, 5]
"""Row 0 three times, as for a rare class."""


def rows():
    return TensorDataset(10 * torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N) % P)


def build():
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, P))


def loop(model, engine, optimizer, data):
    for logical_batch in engine.batches(data, micro_batch_size=4):
        for x, y, *weight in logical_batch:
            losses = F.cross_entropy(model(x), y, reduction="none")
            (losses * weight[0] if weight else losses).mean().backward()
        optimizer.step()


def moved(one, other, **settings):
    whole, rest = (clipped_sum(build, loop, data, **settings) for data in (one, other))
    return float(torch.stack([(whole[name] - rest[name]).norm() for name in whole]).norm()) / R


class Keyed(Dataset):
    """Rows by name, without a length."""

    def __getitem__(self, name):
        return name


REPEATING = {
    "indices": lambda: Subset(rows(), OFTEN),
    "indices of indices": lambda: Subset(Subset(rows(), [3, 3, 4]), [0, 1, 2]),
    "negative indices": lambda: Subset(rows(), [0, -N]),
    "a data set twice": lambda: ConcatDataset([data := rows(), data]),
    "parts that overlap": lambda: ConcatDataset([Subset(data := rows(), [0, 1]), Subset(data, [1, 2])]),
    "augmented": lambda: augment(Subset(rows(), OFTEN), lambda item: item, 2),
}
HONEST = {
    "rows": rows,
    "a split": lambda: random_split(rows(), [4, 2], generator=torch.Generator().manual_seed(0))[0],
    "two data sets": lambda: ConcatDataset([rows(), rows()]),
    "parts apart": lambda: ConcatDataset([Subset(data := rows(), [0, 1]), Subset(data, [2])]),
    "a unit of repetitions": lambda: UnitDataset(Subset(rows(), OFTEN), OFTEN, rows_per_unit=3),
    "names": lambda: Subset(Keyed(), ["a", "b"]),  # pyright: ignore[reportArgumentType]
    "an iterable as indices": lambda: Subset(rows(), range(N)),
}


@pytest.mark.parametrize("case", REPEATING)
def test_repeated_rows_are_told(case):
    with pytest.warns(UserWarning, match="an item up to [23] times"):
        warn_of_repeats(REPEATING[case]())


@pytest.mark.parametrize("case", HONEST)
def test_distinct_rows_are_not_told(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_repeats(HONEST[case]())


@pytest.mark.parametrize("repeats", [True, False])
def test_rows_of_hugging_face_that_are_chosen_twice_are_told(repeats):
    datasets = pytest.importorskip("datasets")
    rare, common = (datasets.Dataset.from_dict({"x": list(range(n))}) for n in (2, 6))
    how = {"probabilities": [0.5, 0.5], "seed": 0}
    how["stopping_strategy"] = "all_exhausted" if repeats else "first_exhausted"
    both = datasets.interleave_datasets([rare, common], **how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for data in (both, Subset(both, range(len(both))), common.shuffle(seed=0), common):
            warn_of_repeats(data)
    assert len(told) == 2 * repeats


def test_the_engine_tells_and_what_the_row_then_counts():
    data = rows()
    engine = PrivacyEngine(build(), batch_size=4, sample_size=len(OFTEN), steps=1, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="up to 3 times") as told:
        engine.batches(Subset(data, OFTEN), micro_batch_size=4)
    assert told[0].filename == __file__
    assert moved(Subset(data, OFTEN), Subset(data, [1, 2, 3, 4, 5])) == pytest.approx(3)


def test_a_unit_of_all_repetitions_counts_once():
    data = rows()
    units = UnitDataset(Subset(data, OFTEN), OFTEN, rows_per_unit=3)
    rest = UnitDataset(Subset(data, OFTEN[3:]), OFTEN[3:], rows_per_unit=3)
    assert moved(units, rest, rows_per_unit=3) <= ALLOWED
