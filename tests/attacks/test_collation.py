"""collate_fn functions that make a sample of several: they replace, mix, scale or cut rows by what comes with them.

One sample counted up to 6.1 times. Padding, sorting, masks, and random numbers of whatever generator stay.
"""

import random
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dpshard.errors import VerificationError
from dpshard.verification import verified_collation
from tests.attacks.oracle import ALLOWED, influence, is_refused

N, D, C = 12, 3, 2
X = 10 * torch.randn(N, D, generator=torch.Generator().manual_seed(1))
X[::4] *= 1e-3  # taken for corrupt
ROWS = TensorDataset(X, torch.arange(N) % C)


class Texts(Dataset):
    """Dicts with the ids of 3 to 9 words."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {"ids": torch.randint(1, 20, (3 + i * 5 % 7,), generator=generator), "label": i % C, "name": str(i)}


def loop_of(collate_fn, micro=6, **options):
    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, micro, collate_fn=collate_fn, **options):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return loop


def linear():
    return nn.Linear(D, C)


# --- of several samples ---------------------------------------------------------------------------------------------


def corrupt_rows_replaced(rows):
    x, y = default_collate(rows)
    bad, good = x.norm(dim=1) < 1, int(x.norm(dim=1).argmax())
    x[bad], y[bad] = x[good].clone(), y[good].clone()
    return x, y


def standardised(rows):
    x, y = default_collate(rows)
    return (x - x.mean(0)) / x.std(0), y


def by_the_largest(rows):
    x, y = default_collate(rows)
    return x / x.abs().max(), y


def mixed_up(rows):
    x, y = default_collate(rows)
    weight = float(torch.distributions.Beta(1.0, 1.0).sample())
    return weight * x + (1 - weight) * x.roll(1, 0), y


def mixed_up_by_numpy(rows):
    x, y = default_collate(rows)
    return x + 0.5 * x[np.random.permutation(len(x))], y  # noqa: NPY002


def labels_of_neighbours(rows):
    x, y = default_collate(rows)
    return x, y[torch.cdist(x, x).fill_diagonal_(1e9).argmin(1)]


def missing_filled_by_the_mean(rows):
    x, y = default_collate(rows)
    return torch.where(x.abs() < 0.1, x.mean(0), x), y


MIXING = [
    corrupt_rows_replaced, standardised, by_the_largest, mixed_up, mixed_up_by_numpy, labels_of_neighbours,
    missing_filled_by_the_mean,
]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", MIXING)
def test_a_sample_made_of_several_is_refused(collate_fn, workers):
    if workers and collate_fn is not standardised:
        pytest.skip("one is enough")
    assert "by itself" in is_refused(linear, loop_of(collate_fn, num_workers=workers), ROWS)


def cut_to_the_shortest(rows):
    n = min(len(row["ids"]) for row in rows)
    return torch.stack([row["ids"][:n] for row in rows]), torch.tensor([row["label"] for row in rows])


def test_texts_cut_to_the_shortest_are_refused():
    with pytest.raises(VerificationError, match="pad to the longest"):
        next(iter(DataLoader(Texts(), 8, collate_fn=verified_collation(cut_to_the_shortest))))


def test_a_fault_that_begins_later_is_found_at_the_next_power_of_two():
    begun = False

    def later(rows):
        return standardised(rows) if begun else default_collate(rows)

    collate_fn, rows = verified_collation(later), [ROWS[i] for i in range(8)]
    for call in range(1, 8):
        begun = call > 4
        collate_fn(rows)
    with pytest.raises(VerificationError):
        collate_fn(rows)


# --- of each sample by itself ---------------------------------------------------------------------------------------


def padded(rows):
    ids = pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([row["label"] for row in rows])}


def padded_on_the_left(rows):
    ids = pad_sequence([row["ids"] for row in rows], batch_first=True, padding_side="left")
    return ids, (ids > 0).cumsum(1), (ids > 0).float()


def with_positions(rows):
    batch = padded(rows)
    batch["positions"] = torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])
    batch["causal"] = (
        batch["mask"][:, None] * torch.ones(9, 9)[: batch["ids"].shape[1], : batch["ids"].shape[1]]
    ).tril()
    return batch


def sorted_by_length(rows):
    return padded(sorted(rows, key=lambda row: -len(row["ids"])))


def written_into_the_samples(rows):
    for row in rows:
        row["ids"] = F.pad(row["ids"], (0, 9 - len(row["ids"])))
    return torch.stack([row.pop("ids") for row in rows]), [row["name"] for row in rows]


def masked_at_random(rows):
    ids = padded(rows)["ids"]
    masked = torch.bernoulli(torch.full(ids.shape, 0.3)).bool()
    return torch.where(masked, torch.randint(1, 20, ids.shape), ids), torch.where(masked, ids, -100)


def noised_by_numpy(rows):
    return np.stack([row["ids"][:3].numpy() + np.random.randn() for row in rows])  # noqa: NPY002


def cropped_by_python(rows):
    starts = [random.randrange(len(row["ids"]) - 2) for row in rows]
    return torch.stack([row["ids"][at : at + 3] for at, row in zip(starts, rows, strict=True)])


def noised_by_a_fresh_generator(rows):
    ids = padded(rows)["ids"]
    return ids + torch.tensor(np.random.default_rng().random(ids.shape))


class Held:
    """Draws from its own generator."""

    def __init__(self):
        self.generators = np.random.default_rng(1)

    def __call__(self, rows):
        return [row["name"] for row in rows], self.generators.random((len(rows), 2))


@dataclass
class Batch:
    ids: torch.Tensor
    names: list[str]


class HeldBySystem:
    """Draws from a source without a state."""

    def __init__(self):
        self.generator = random.SystemRandom()

    def __call__(self, rows):
        return [row["name"] for row in rows], [self.generator.random() for _ in rows]


def as_a_dataclass(rows):
    return Batch(padded(rows)["ids"], [row["name"] for row in rows])


def as_an_encoding(rows):
    return UserDict(padded(rows))


def words_dropped_at_random(rows):
    return [
        row["ids"][torch.tensor([random.random() < 0.8 for _ in row["ids"]])].tolist() or [0] for row in rows
    ], torch.tensor([row["ids"][random.randrange(len(row["ids"]))] for row in rows])


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


HONEST = [
    padded, padded_on_the_left, with_positions, sorted_by_length, written_into_the_samples, masked_at_random,
    noised_by_numpy, cropped_by_python, noised_by_a_fresh_generator, Held(), HeldBySystem(), as_a_dataclass,
    as_an_encoding,
]  # fmt: skip


@pytest.mark.parametrize("collate_fn", HONEST, ids=lambda f: getattr(f, "__name__", "held"))
def test_an_honest_collate_fn_passes_and_draws_what_it_drew(collate_fn):
    """On 36 micro-batches, of all sizes."""
    for size in range(1, N + 1):
        for start in range(0, N, 4):
            rows = [Texts()[(start + i) % N] for i in range(size)]
            seed(size)
            verified_collation(collate_fn)(rows)
            drawn = torch.rand(()), np.random.rand(), random.random()  # noqa: NPY002
            rows = [Texts()[(start + i) % N] for i in range(size)]
            seed(size)
            collate_fn(rows)
            assert drawn == (torch.rand(()), np.random.rand(), random.random())  # noqa: NPY002


def test_words_that_are_dropped_at_random_pass_whatever_their_lengths():
    """Lengths decide the number of draws, and may by chance add up to the same."""
    for trial in range(40):
        seed(trial)
        order = torch.randperm(N).tolist()
        collate_fn, texts = verified_collation(words_dropped_at_random), Texts()
        for at in (0, 4, 8):
            rows, state = [texts[i] for i in order[at : at + 4]], random.getstate()
            words, labels = collate_fn(rows)
            random.setstate(state)
            plain_words, plain_labels = words_dropped_at_random(rows)
            assert words == plain_words
            assert labels.tolist() == plain_labels.tolist()


class AskedForSeveral(TensorDataset):
    """Standardises rows over those requested together, as a batched transform may."""

    def __getitems__(self, indices):
        x = self.tensors[0][indices]
        return list(zip((x - x.mean(0)) / x.std(0), self.tensors[1][indices], strict=True))


def test_a_data_set_is_asked_for_one_sample_at_a_time():
    assert influence(linear, loop_of(default_collate), AskedForSeveral(*ROWS.tensors), left_out=(0, 3)) <= ALLOWED


def test_an_honest_collate_fn_is_exact():
    def halved(rows):
        x, y = default_collate(rows)
        return x / 2, y

    found = influence(linear, loop_of(halved), ROWS, left_out=(1, 3))
    assert 0.3 < found <= ALLOWED


def test_nothing_is_verified_if_the_engine_does_not():
    assert is_refused(linear, loop_of(standardised), ROWS, verify=False) is None
