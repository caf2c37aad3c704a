"""Texts padded to the longest of their micro-batch, and read without a mask: one sample counted 2.3 times."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests.attacks.oracle import ALLOWED, influence, is_refused


class Texts(Dataset):
    """15 texts of 3 to 5 words, and one of 12."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randint(1, 20, (12 if i == 7 else 3 + i % 3,), generator=generator), i % 2


def collate(rows):
    return pad_sequence([row[0] for row in rows], batch_first=True), torch.tensor([row[1] for row in rows])


class Pooled(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.words, self.head, self.masked = nn.Embedding(20, 4), nn.Linear(4, 2), masked

    def forward(self, ids):
        mask = (ids > 0)[..., None] if self.masked else torch.ones_like(ids)[..., None]
        return self.head(5 * (self.words(ids) * mask).sum(1) / mask.sum(1))


def loop(model, engine, optimizer, dataset):
    for logical_batch in engine.batches(dataset, 8, collate_fn=collate):
        for ids, y in logical_batch:
            F.cross_entropy(model(ids), y).backward()
        optimizer.step()


def test_padding_that_counts_is_refused_where_several_rows_are_the_longest():
    assert "padding without a mask" in is_refused(lambda: Pooled(masked=False), loop, Texts())


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.features = Pooled(masked=False), nn.Linear(64, 2)

    def forward(self, ids, x):
        return self.text(ids) + self.features(x)


def test_padding_that_counts_is_refused_beside_a_wider_input():
    def loop_beside(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, 8, collate_fn=collate):
            for ids, y in logical_batch:
                F.cross_entropy(model(ids, torch.full((len(ids), 64), 0.01)), y).backward()
            optimizer.step()

    assert "padding without a mask" in is_refused(Beside, loop_beside, Texts())


class Ended(Texts):
    """Texts that begin with the padding id; or only the longest has it, once."""

    def __init__(self, everywhere):
        self.everywhere = everywhere

    def __getitem__(self, i):
        ids, label = super().__getitem__(i)
        ids[5 if i == 7 else 0] *= not (self.everywhere or i == 7)
        return ids, label


@pytest.mark.parametrize("everywhere", [False, True])
def test_padding_that_counts_is_refused_where_its_id_also_stands_in_texts(everywhere):
    assert "padding without a mask" in is_refused(lambda: Pooled(masked=False), loop, Ended(everywhere))


@pytest.mark.parametrize("i", [0, 7])
def test_padding_that_is_masked_is_exact(i):
    assert 0.1 < influence(lambda: Pooled(masked=True), loop, Texts(), left_out=[i]) <= ALLOWED
