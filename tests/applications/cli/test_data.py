import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpshard.applications.cli import data, models
from dpshard.applications.cli.data import BEGIN, MASK, PAD, Kind
from dpshard.applications.cli.settings import resolve
from dpshard.applications.cli.tasks import load
from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling.packing import IGNORED
from dpshard.sampling.units import UnitDataset


def rows(dataset):
    return [dataset[i] for i in range(len(dataset))]


def test_the_splits_are_disjoint_cover_everything_and_do_not_depend_on_the_seed():
    one, other = (load(resolve({"seed": seed})) for seed in (0, 1))
    assert [len(split) for split in (one.train, one.validation, one.test)] == [1258, 180, 359]
    images = torch.cat([split.tensors[0] for split in (one.train, one.validation, one.test)])
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 1797
    assert torch.equal(one.test.tensors[0], other.test.tensors[0])


def test_texts_are_shifted_by_one_and_have_no_loss_after_their_end():
    x, y = data.language(["ab", "abcdef"], resolve({"max_length": 4})).tensors
    assert x.tolist() == [[BEGIN, 97, 98, PAD], [BEGIN, 97, 98, 99]]
    assert y.tolist() == [[97, 98, IGNORED, IGNORED], [97, 98, 99, 100]]


def test_masked_bytes_are_the_targets_and_nothing_else():
    texts = ["", "a", "abcdefghij" * 2, "é" * 30]
    x, y = data.masked(texts, resolve({"max_length": 20})).tensors
    hidden = x == MASK
    assert hidden.sum(1).tolist() == [0, 1, 3, 3]  # 15% of 20 bytes
    assert torch.equal(y != IGNORED, hidden)
    plain = torch.stack([data.tokens(text, 20) for text in texts])
    assert torch.equal(torch.where(hidden, y, x), plain)
    assert torch.equal(x, data.masked(texts, resolve({"max_length": 20, "seed": 1})).tensors[0])


def test_the_documentation_is_cut_into_paragraphs():
    loaded = load(resolve({"task": "pydoc"}))
    assert loaded.kind is Kind.LANGUAGE
    assert len(loaded.train) > 1500


def jsonl(path: Path) -> Path:
    lines = [json.dumps({"text": "good" if i % 2 else "bad", "label": ["no", "yes"][i % 2]}) for i in range(20)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def table(path: Path) -> Path:
    path.write_text("a,b,label\n" + "".join(f"{i},{2 * i},{i % 3}\n" for i in range(20)))
    return path


def image_folder(path: Path) -> Path:
    for i in range(20):
        target = path / ["cat", "dog"][i % 2] / f"{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 7), color=12 * i).save(target)
    return path


def npz(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


PIXELS = np.arange(20 * 64, dtype=np.uint8).reshape(20, 8, 8)
LABELS = np.arange(20) % 4


@pytest.mark.parametrize(
    ("make", "name", "kind", "shape", "classes"),
    [
        (jsonl, "x.jsonl", Kind.TEXT, (129,), 2),
        (table, "x.csv", Kind.FEATURES, (4,), 3),
        (image_folder, "images", Kind.IMAGE, (3, 32, 32), 2),
        (lambda path: npz(path, x=PIXELS, y=LABELS), "x.npz", Kind.IMAGE, (1, 8, 8), 4),
        (lambda path: npz(path, x=PIXELS[:, :2], y=LABELS), "y.npz", Kind.IMAGE, (1, 2, 8), 4),
        (lambda path: npz(path, x=PIXELS.reshape(20, 64) / 7.0, y=LABELS), "z.npz", Kind.FEATURES, (128,), 4),
    ],
)
def test_own_data_of_every_kind(tmp_path, make, name, kind, shape, classes):
    settings = resolve({"data": str(make(tmp_path / name))})
    loaded = load(settings)
    assert (loaded.kind, loaded.classes) == (kind, classes)
    assert [len(split) for split in (loaded.train, loaded.validation, loaded.test)] == [14, 2, 4]
    x, _ = loaded.train[0]
    assert x.shape == shape
    if x.is_floating_point() and kind is Kind.IMAGE:
        assert 0 <= x.min() <= x.max() <= 1
    model = models.build(models.choose(loaded, "data"), loaded, settings)
    assert model(torch.stack([x, x])).shape == (2, classes)


def test_number_columns_are_divided_by_a_public_scale(tmp_path):
    path = table(tmp_path / "x.csv")
    plain, scaled = (load(resolve({"data": str(path), "feature_scale": scale})).train for scale in (40, 80))
    assert torch.equal(plain.tensors[0], 2 * scaled.tensors[0])
    assert plain.tensors[0].abs().max() <= 1


def test_text_without_labels_is_for_a_language_model(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("text\n" + "hello\n" * 10)
    assert load(resolve({"data": str(path)})).kind is Kind.LANGUAGE


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "", "empty"),
        ("x.csv", "a,label\n", "empty"),
        ("x.csv", "a,label\n1,0\n1\n", "line 3"),
        ("x.csv", "a,label\n1,0\n1,2,3\n", "line 3"),
        ("x.tsv", "a\tlabel\n1\t0\n1\n", "line 3"),
        ("x.csv", "a,b\n1,0\n", "--label-column"),
        ("x.csv", "\xff\xfe", "cannot be read"),
        ("x.jsonl", "\n", "empty"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text"\n', "line 2"),
        ("x.jsonl", "[1]\n", "line 1"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', r"x\.jsonl, line 2.*'label'"),
        ("x.npz", "no archive", "cannot be read"),
        ("x.jsonl", '{"text": "a", "label": [1]}\n', "label must be"),
        ("x.parquet", "?", "not a Parquet file"),
        ("x.xlsx", "?", "expected"),
    ],
)
def test_damaged_data_say_what_and_where(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        load(resolve({"data": str(path)}))


@pytest.mark.parametrize("make", [jsonl, table])
def test_a_text_column_that_was_named_has_to_be_there(tmp_path, make):
    path = make(tmp_path / ("x.csv" if make is table else "x.jsonl"))
    with pytest.raises(DataError, match=r"no column 'body', but .*'label'"):
        load(resolve({"data": str(path), "text_column": "body"}))


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    texts = np.array([["a"]] * 20)
    wrong = [
        ({"x": PIXELS}, "two arrays"),
        ({"x": PIXELS, "y": LABELS[:3]}, "each"),
        ({"x": texts, "y": LABELS}, "each"),
    ]
    for arrays, message in wrong:
        with pytest.raises(DataError, match=message):
            load(resolve({"data": str(npz(tmp_path / "x.npz", **arrays))}))


def test_an_archive_of_objects_is_not_unpickled(tmp_path):
    path = npz(tmp_path / "x.npz", x=np.array([object()]), y=np.array([1]))
    with pytest.raises(DataError, match="cannot be read"):
        load(resolve({"data": str(path)}))


def test_a_folder_without_images_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="empty"):
        load(resolve({"data": str(tmp_path)}))
    with pytest.raises(DataError, match="does not exist"):
        load(resolve({"data": str(tmp_path / "x.csv")}))


@pytest.mark.parametrize("damage", [lambda content: b"no image", lambda content: content[: len(content) // 2]])
def test_a_damaged_image_is_named_before_anything_is_trained(tmp_path, damage):
    folder = image_folder(tmp_path / "images")
    path = folder / "cat" / "0.png"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"0\.png"):
        load(resolve({"data": str(folder)}))


def test_what_guessing_gets_right_is_the_share_of_the_commonest_class(tmp_path):
    for loaded in (load(resolve({"data": str(image_folder(tmp_path / "images"))})), load(resolve({}))):
        labels = torch.tensor([y for _, y in rows(loaded.test)])
        assert loaded.guessing == pytest.approx((labels == labels.mode().values).double().mean().item())
    assert load(resolve({"task": "pydoc"})).guessing is None


class HubSplit:
    """As much of a Hugging Face data set as we use."""

    def __init__(self, columns, features):
        self.columns, self.features = columns, features

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}

    def to_list(self):
        return [self[i] for i in range(len(next(iter(self.columns.values()))))]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`, whose load_dataset gives what the test says."""
    module = types.ModuleType("datasets")
    module.Image = type("Image", (), {})
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_texts_of_the_hub(hub):
    columns = {"sentence": ["good", "bad"] * 10, "label": [1, 0] * 10}
    asked = []
    hub.load_dataset = lambda *name: asked.append(name) or {"train": HubSplit(columns, dict.fromkeys(columns))}
    loaded = load(resolve({"data": "hf:glue:sst2", "text_column": "sentence"}))
    assert asked == [("glue", "sst2")]
    assert (loaded.kind, loaded.classes, len(loaded.train)) == (Kind.TEXT, 2, 14)


def test_images_of_the_hub(hub):
    columns = {"img": [Image.new("RGB", (5, 5))] * 20, "label": [1, 0] * 10}
    split = HubSplit(columns, {"img": hub.Image(), "label": None})
    hub.load_dataset = lambda *_: {"train": split}
    loaded = load(resolve({"data": "hf:someone/cifar", "image_size": 8}))
    assert loaded.train[0][0].shape == (3, 8, 8)
    with pytest.raises(DataError, match="--label-column"):
        load(resolve({"data": "hf:someone/cifar", "label_column": "fine"}))


def test_a_hub_out_of_reach_and_a_missing_package_are_explained(hub, monkeypatch):
    def offline(*_):
        raise ConnectionError("Couldn't reach the Hub")

    hub.load_dataset = offline
    with pytest.raises(DataError, match=r"'glue'.*Couldn't reach"):
        load(resolve({"data": "hf:glue"}))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"dpshard\[hf\]"):
        load(resolve({"data": "hf:glue"}))


def test_a_model_that_cannot_learn_the_data_is_refused():
    settings = resolve({"task": "pydoc"})
    with pytest.raises(ConfigurationError, match="gpt"):
        models.build("cnn", load(settings), settings)


def test_a_language_model_without_transformers_is_our_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    loaded = load(resolve({"task": "pydoc"}))
    assert models.choose(loaded, "pydoc") == "gpt"
    with pytest.raises(ConfigurationError, match=r"dpshard\[hf\]"):
        models.build("gpt2", loaded, resolve({"task": "pydoc"}))


def test_the_head_of_the_language_model_is_its_embedding():
    model = models.gpt(8)
    assert not any("head" in name for name, _ in model.named_parameters())
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, data.VOCABULARY)


def grouped(path: Path, ids: list[object]) -> Path:
    lines = [json.dumps({"a": i, "b": -i, "label": i % 2, "patient": x}) for i, x in enumerate(ids)]
    path.write_text("\n".join(lines))
    return path


def test_units_of_a_column_stay_whole(tmp_path):
    """No patient is in two splits, and the training counts patients."""
    ids = [f"p{i % 10}" for i in range(60)]
    source = grouped(tmp_path / "x.jsonl", ids)
    facts = {"data": str(source), "group_column": "patient", "rows_per_unit": 4, "feature_scale": 100}
    loaded = load(resolve(facts))
    assert isinstance(loaded.train, UnitDataset)
    assert (len(loaded.train), loaded.rows_per_unit) == (7, 4)
    assert loaded.sample == "one patient, up to 4 rows in a step"
    assert loaded.example().shape == (4,)  # the column of the unit is no number to learn from
    splits = [loaded.train.dataset, loaded.validation, loaded.test]
    own = [{ids[round(float(x[0]) * 100)] for x, _ in rows(split)} for split in splits]
    assert sum(map(len, own)) == len(set.union(*own)) == 10
    assert sum(map(len, splits)) == 60
    assert load(resolve({"data": str(source), "group_column": "patient"})).rows_per_unit == 8


@pytest.mark.parametrize("ids", [["p", 1], ["p", " "], ["p", None], ["p", 1.5], [1, 1.0], [1, True]])
def test_rows_that_name_no_unit_are_refused(tmp_path, ids):
    """An id that is written in two ways would be two units."""
    source = grouped(tmp_path / "x.jsonl", ids * 10)
    with pytest.raises(DataError, match=r"line 2.*patient"):
        load(resolve({"data": str(source), "group_column": "patient"}))


def test_a_column_of_units_needs_a_table(tmp_path):
    with pytest.raises(DataError, match="no column 'user'"):
        load(resolve({"data": str(grouped(tmp_path / "x.jsonl", ["p"] * 4)), "group_column": "user"}))
    with pytest.raises(DataError, match="has no columns"):
        load(resolve({"data": str(image_folder(tmp_path / "images")), "group_column": "user"}))
    with pytest.raises(ConfigurationError, match="--data"):
        resolve({"group_column": "user"})
    with pytest.raises(ConfigurationError, match="--group-column"):
        resolve({"rows_per_unit": 3})
