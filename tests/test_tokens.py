"""TokenStore: documents cut within themselves, read at random, from any process; and what bad stores get."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpshard
from dpshard import PrivacyEngine, TokenStore, UnitDataset
from dpshard.errors import ConfigurationError, DataError

DOCUMENTS = [[5, 6, 7, 8, 9], [], [1], [2, 3, 4, 5]]


def written(folder, documents=DOCUMENTS, **options):
    return TokenStore.write(folder, documents, **{"length": 2, "vocabulary": 10, "pad": 0, **options})


@given(documents=st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=6), length=st.integers(1, 5))
def test_no_sequence_has_tokens_of_two_documents(tmp_path_factory, documents, length):
    store = written(tmp_path_factory.mktemp("store") / "x", documents, length=length)
    expected = [
        (number, document[start : start + length])
        for number, document in enumerate(documents)
        for start in range(0, len(document), length)
    ]
    assert len(store) == len(expected)
    order = [i * 7 % len(store) for i in range(len(store))][::-1] if len(store) else []
    rows = store.rows(order)
    assert rows.shape == (len(store), length)
    for i, row, item in zip(order, rows, store.__getitems__(order), strict=True):
        assert row.tolist() == item.tolist() == expected[i][1] + [0] * (length - len(expected[i][1]))
    for i, (number, tokens) in enumerate(expected):
        assert store[i].tolist() == tokens + [0] * (length - len(tokens))
        assert store.documents[i] == number


@pytest.mark.parametrize(("vocabulary", "size"), [(2**16, 2), (2**16 + 1, 4)])
def test_bytes_of_a_token(tmp_path, vocabulary, size):
    store = written(tmp_path, vocabulary=vocabulary)
    assert (tmp_path / "tokens.bin").stat().st_size == 10 * size
    assert store[0].dtype == torch.int64


def test_other_processes_open_the_files_themselves(tmp_path):
    store = written(tmp_path, [np.arange(9).tolist()] * 1000, length=9)
    assert store[3].tolist() == list(range(9))
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[7], store[7])
    assert len(list(torch.utils.data.DataLoader(store, batch_size=250, num_workers=2))) == 4


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_a_store_trains_by_sequence_and_by_document(tmp_path):
    store = written(tmp_path, [[1 + i % 8] * (3 + i % 4) for i in range(40)])
    units = UnitDataset(store, store.documents, rows_per_unit=2)
    assert len(units) == 40
    for data, rows in ((store, 1), (units, 2)):
        model = torch.nn.Embedding(10, 2)
        settings = {"batch_size": 8, "steps": 2, "noise_multiplier": 0.0, "rows_per_unit": rows}
        engine = PrivacyEngine(model, sample_size=len(data), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for logical_batch in engine.batches(data, 4):
            for ids in logical_batch:
                ids = ids if isinstance(ids, torch.Tensor) else ids[0]
                model(ids).square().flatten(1).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.step == 2
        engine.detach()


def test_bad_stores(tmp_path):
    with pytest.raises(DataError, match="holds no token store"):
        TokenStore(tmp_path)
    with pytest.raises(DataError, match="Document 1 is not a list of token ids from 0 to 9"):
        written(tmp_path / "ids", [[1], [10]])
    with pytest.raises(DataError, match="holds no token store"):
        TokenStore(tmp_path / "ids")  # the failed one
    for bad in ({"length": 0}, {"pad": 10}, {"vocabulary": 0}):
        with pytest.raises(ConfigurationError, match="pad in the vocabulary"):
            written(tmp_path / "bad", **bad)
    store = written(tmp_path / "good")
    with pytest.raises(DataError, match="already"):
        written(tmp_path / "good")
    with pytest.raises(IndexError):
        store[len(store)]
    for beyond in (-1, len(store)):
        with pytest.raises(IndexError, match="sequences"):
            store.rows([0, beyond])
    with (tmp_path / "good" / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="not written whole"):
        TokenStore(tmp_path / "good")
    assert dpshard.TokenStore is TokenStore
