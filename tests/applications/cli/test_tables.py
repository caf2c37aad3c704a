"""`dpshard train` on tables: what is public, what is private and charged, and that nothing shows a cell.

Failure modes: 24 test_a_resumed_run_keeps_its_private_bounds; 25 test_private_bounds_are_in_the_ledger_and_the_report.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

from dpshard.accounting import Release, SampledMechanism, compute_epsilon
from dpshard.applications.cli.data import Kind
from dpshard.applications.cli.formats import parse_weights, read_yaml
from dpshard.applications.cli.settings import resolve
from dpshard.applications.cli.tables import Fitted
from dpshard.applications.cli.tasks import load
from dpshard.applications.tabular import parse_columns
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError, DpshardError

pytestmark = pytest.mark.usefixtures("coarse_losses")

pandas = pytest.importorskip("pandas")

COLUMNS = {"age": [0, 100], "sex": ["f", "m"], "visit": ["2020-01-01", "2020-12-31"], "label": ["no", "yes"]}


def patients(count=60):
    random = np.random.default_rng(0)
    age = random.integers(0, 100, count)
    return pandas.DataFrame(
        {
            "name": [f"patient {i}" for i in range(count)],
            "age": [str(a) if a % 9 else "" for a in age],
            "sex": random.choice(["f", "m", "x"], count),
            "visit": [f"2020-{1 + i % 12:02}-03" for i in range(count)],
            "pressure": random.normal(120, 10, count).round(1),
            "label": np.where(age > 50, "yes", "no"),
        }
    )


def written(tmp_path, frame, name="x.csv", columns=COLUMNS):
    path = tmp_path / name
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    facts = tmp_path / "columns.yaml"
    facts.write_text(
        yaml.safe_dump(columns).replace("'2020-01-01'", "2020-01-01").replace("'2020-12-31'", "2020-12-31")
    )
    return {"data": str(path), "columns": str(facts), "drop": "name"}


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.parquet"])
def test_every_kind_of_file_reads_alike(tmp_path, name):
    loaded = load(resolve(written(tmp_path, patients(), name) | {"feature_scale": 200}))
    assert (loaded.kind, loaded.classes, loaded.numbers) == (Kind.FEATURES, 2, 3)
    x, y = loaded.train.tensors
    # age, visit, pressure; the same missing; sex: missing, other, f, m
    assert x.shape == (42, 10)
    assert ((x >= -1) & (x <= 1)).all()
    assert (x[:, 6:].sum(1) == 1).all()
    present = x[:, 3] == 0
    assert ((x[present, 0] > 0) == (y[present] == 1)).all()
    assert loaded.fitted.earlier == ()


def test_private_bounds_are_those_of_the_training_rows_only(tmp_path, monkeypatch):
    # The median of an even number of rows is a whole gap, in which the noise chooses.
    monkeypatch.setattr("dpshard.applications.tabular.statistics.new_run_secret", lambda: bytes(32))
    frame = patients(400)
    settings = resolve(written(tmp_path, frame) | {"statistics_noise": 1e-6})
    low, high = load(settings).fitted.encoder.columns["pressure"].bounds
    held = load(settings)
    train = len(held.train)
    assert held.fitted.earlier == ((Release(1e-6, 1.0, train), 1),)
    # Rows that are held out may be anything.
    from dpshard.applications.cli.data import parts

    frame.loc[np.concatenate([parts(400, settings, None).rows[s] for s in ("test", "validation")]), "pressure"] = 1e9
    settings = resolve(written(tmp_path, frame) | {"statistics_noise": 1e-6})
    assert load(settings).fitted.encoder.columns["pressure"].bounds == pytest.approx((low, high), abs=1)


def test_private_bounds_are_in_the_ledger_and_the_report(tmp_path, dpshard):
    source = written(tmp_path, patients())
    run = [f"--{name}={value}" for name, value in source.items()]
    size = "--steps 4 --batch-size 21 --target-epsilon 2 --target-delta 1e-3 --evaluations 1".split()
    dpshard("train", *run, *size, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    privacy, fitted = report["privacy"], Fitted.read(tmp_path / "run" / "columns.json")
    ((release, count),) = fitted.earlier
    assert count == 1
    assert release.sample_size == 42
    alone = compute_epsilon(fitted.earlier, 1e-3)
    assert alone == pytest.approx(0.6, rel=0.01)  # 0.3 of 2
    run = SampledMechanism(
        schedule=BatchSchedule((21,) * 4),
        sample_size=42,
        noise_multiplier=privacy["noise_multiplier"],
        earlier=fitted.earlier,
    )
    assert privacy["epsilon"] == compute_epsilon(run.releases(), 1e-3)
    assert alone < privacy["epsilon"] <= 2
    assert "1 releases about all samples before them" in privacy["statement"]
    assert "private bounds" in (tmp_path / "run" / "report.md").read_text()
    known = f"--sample-size 42 --batch-size 21 --steps 4 --sigma {privacy['noise_multiplier']} --target-delta 1e-3"
    answer = dpshard("account", *known.split(), "--earlier", release.noise_multiplier, "--json").stdout
    assert json.loads(answer)["answers"][0]["epsilon"] == privacy["epsilon"]


def test_balanced_weights_come_from_private_counts_in_the_budget(tmp_path, dpshard):
    frame = patients(300)
    frame["label"] = np.where(np.arange(300) % 10 == 0, "yes", "no")
    source = written(tmp_path, frame, columns=COLUMNS | {"pressure": [0, 300]}) | {"class-weights": "balanced"}
    run = [f"--{name}={value}" for name, value in source.items()]
    size = "--steps 4 --batch-size 21 --target-epsilon 8 --target-delta 1e-3 --evaluations 1".split()
    dpshard("train", *run, *size, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    fitted = Fitted.read(tmp_path / "run" / "columns.json")
    ((release, _),) = fitted.earlier
    assert report["privacy"]["earlier"] == [[release.noise_multiplier, 1]]
    assert report["privacy"]["clipping_fn"] == "abadi"  # automatic clipping would lose the weights
    assert compute_epsilon(fitted.earlier, 1e-3) == pytest.approx(2.4, rel=0.01)  # 0.3 of 8
    # Classes are no, yes. Of 210 rows some 21 are yes, by noise of 1.1: five deviations are 6e-7.
    assert 210 / (21 + 12 + 5 * release.noise_multiplier) < fitted.weights[1] < 60
    assert fitted.weights[0] < 1.3


def test_weights_of_numbers_are_refused(tmp_path):
    source = written(tmp_path, patients().assign(label=3), columns=COLUMNS | {"label": [0, 5]})
    with pytest.raises(ConfigurationError, match="class_weights are for classes"):
        load(resolve(source | {"class_weights": "balanced"}))


def test_a_resumed_run_keeps_its_private_bounds(tmp_path, dpshard, monkeypatch):
    source = written(tmp_path, patients())
    run = [f"--{name}={value}" for name, value in source.items()]
    size = (
        "--steps 4 --batch-size 21 --target-epsilon 2 --target-delta 1e-3 --evaluations 1 --checkpoint-every 2".split()
    )
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            "dpshard.applications.cli.final_report.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        dpshard("train", *run, *size, "--out", folder, exit_code=130)
    before = (folder / "columns.json").read_text()
    monkeypatch.setattr("dpshard.applications.tabular.encoding.private_statistics", None)  # no second release
    dpshard("train", "--resume", folder)
    assert (folder / "columns.json").read_text() == before
    gone = shutil.copytree(folder, tmp_path / "gone")
    (gone / "report.md").unlink()
    for damaged in ("{", "[]", '{"columns": {"age": {}}}'):
        (gone / "columns.json").write_text(damaged)
        assert "second release" in dpshard("train", "--resume", gone, exit_code=2).stderr
    (gone / "columns.json").unlink()
    assert "second release" in dpshard("train", "--resume", gone, exit_code=2).stderr


def test_bounds_of_the_label_make_it_a_number(tmp_path, dpshard):
    frame = patients().assign(label=lambda f: f["pressure"] * 2)
    source = written(tmp_path, frame, columns={"label": [200, 300], "pressure": [100, 140]}) | {
        "drop": "name,sex,visit,age"
    }
    loaded = load(resolve(source))
    assert loaded.kind is Kind.NUMBERS
    x, y = loaded.train.tensors
    inside = x[:, 0].abs() < 1
    torch.testing.assert_close(y[inside], (2 * (x[inside, 0] * 20 + 120) - 250) / 50, atol=1e-4, rtol=0)
    run = [f"--{name}={value}" for name, value in source.items()]
    size = "--steps 40 --batch-size 21 --target-epsilon 50 --target-delta 1e-3 --model linear --evaluations 1".split()
    dpshard("train", *run, *size, "--out", tmp_path / "run", "--learning-rate", 0.05)
    scores = json.loads((tmp_path / "run" / "report.json").read_text())["test"]
    assert scores["after"]["r2"] > 0.5 > scores["before"]["r2"]
    assert scores["after"]["rmse"] < scores["before"]["rmse"]
    assert "R²" in (tmp_path / "run" / "report.md").read_text()


def test_a_resumed_run_keeps_the_order_of_its_classes(tmp_path):
    facts = {"feature_scale": 200}
    first = load(resolve(written(tmp_path, patients(), columns={"label": ["yes", "no"]}) | facts))
    kept = tmp_path / "columns.json"
    kept.write_text(json.dumps(first.fitted.plain()))
    edited = resolve(written(tmp_path, patients(), columns={"label": ["no", "yes"]}) | facts)
    again = load(edited, lambda fit: Fitted.read(kept))
    assert (again.train.tensors[1] == first.train.tensors[1]).all()
    assert (load(edited).train.tensors[1] != first.train.tensors[1]).all()


def test_yes_and_no_are_names_without_quotes(tmp_path):
    path = tmp_path / "columns.yaml"
    path.write_text("outcome: [no, yes]\non: [0, 1]\nday: [2020-01-01, 2020-01-02]\nbed: [true, false]\n")
    found = read_yaml(path, names=True)
    assert found["outcome"] == ["no", "yes"]
    assert found["on"] == [0, 1]
    assert found["bed"] == [True, False]
    assert parse_columns({"day": found["day"]})["day"].kind == "date"


def test_labels_that_would_be_classes_by_accident_are_refused(tmp_path):
    frame = patients().assign(label=lambda f: f["pressure"])
    with pytest.raises(ConfigurationError, match="not whole"):
        load(resolve(written(tmp_path, frame, columns={"age": [0, 100]})))
    for kind in ("date", "drop"):
        with pytest.raises(ConfigurationError, match=f"is not a {kind}"):
            load(resolve(written(tmp_path, frame, columns={"label": kind})))


def test_one_scale_of_all_numbers_leaves_dates_alone(tmp_path):
    source = written(tmp_path, patients(), columns={"age": [0, 90], "visit": "date"})
    found = load(resolve(source | {"feature_scale": 200, "statistics_noise": 0.1})).fitted
    assert found.encoder.columns["age"].bounds == (0, 90)
    assert found.encoder.columns["pressure"].bounds == (-200, 200)
    assert found.encoder.columns["visit"].bounds[0] > 10_000  # of 2020, in days since 1970
    assert len(found.earlier) == 1


def test_weights_belong_to_labels(tmp_path):
    source = written(tmp_path, patients()) | {"feature_scale": 200}
    loaded = load(resolve(source | {"class_weights": "yes=5"}))
    assert loaded.objective.weights == (1.0, 5.0)
    with pytest.raises(ConfigurationError, match="no label maybe"):
        load(resolve(source | {"class_weights": "maybe=5"}))
    for wrong in ("yes", "yes=0", "yes=x"):
        with pytest.raises(ConfigurationError, match="class_weights"):
            parse_weights(wrong)


def test_units_have_private_bounds_of_units(tmp_path):
    frame = patients().assign(name=lambda f: [f"p{i % 20}" for i in range(len(f))])
    source = written(tmp_path, frame) | {"group_column": "name", "drop": None, "statistics_noise": 1.0}
    ((release, _),) = load(resolve(source)).fitted.earlier
    assert release.sample_size == 14  # of 20 patients


def test_columns_without_any_bounds_are_named(tmp_path):
    source = written(tmp_path, patients()) | {"noise_multiplier": 1.0}
    with pytest.raises(ConfigurationError, match="no public bounds: pressure"):
        load(resolve(source))
    with pytest.raises(DpshardError, match="--columns is for"):
        load(resolve(source | {"data": str(tmp_path)}))


POISON = "POISON-4711"


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
@pytest.mark.parametrize("column", ["age", "sex", "visit", "pressure", "label", "patient", "broken"])
def test_nothing_shows_a_cell(tmp_path, capsys, name, column):
    frame = patients().astype({"pressure": object}).assign(patient=list(range(60)))
    if column in frame:
        frame[column] = frame[column].astype(object)
        frame.loc[3, column] = POISON
    if name == "x.parquet":
        frame = frame.astype(str)
    source = written(tmp_path, frame, name) | {"group_column": "patient", "statistics_noise": 5.0}
    if column == "broken":
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(b"3", b'3,"' + POISON.encode() + b"\xff", 1))
    shown = ""
    try:
        loaded = load(resolve(source))
        shown = json.dumps(loaded.fitted.plain()) + repr(loaded.objective) + loaded.sample
    except DpshardError as error:
        assert column in ("label", "patient", "broken")
        chain = error
        while chain is not None:
            shown, chain = (
                shown + str(chain),
                chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__),
            )
    assert POISON not in shown + "".join(capsys.readouterr())


def test_a_table_of_a_spreadsheet_with_a_byte_order_mark_reads(tmp_path):
    settings = written(tmp_path, patients(), columns=COLUMNS | {"age": [0, 100]})
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # before the name of the first column
    assert load(resolve(settings | {"feature_scale": 200})).numbers == 3


POISON = "POISON-4711"


@pytest.mark.parametrize(
    ("change", "columns", "said"),
    [
        ({"label": "no"}, {}, "nothing to learn"),
        ({"label": [f"{POISON}-{i}" for i in range(60)]}, {}, "identifier"),
        ({"label": ["no", "yes"] * 29 + ["yes", " "]}, {}, "line 61: no 'label'"),
        ({"pressure": [f"{i},5 {POISON}" for i in range(60)]}, {"pressure": [0, 300]}, "decimal comma"),
        ({"visit": [f"13.01.20{i}" for i in range(60)]}, {"visit": "date"}, "2026-01-31"),
    ],
)
def test_tables_that_cannot_be_learnt_are_refused_without_a_cell(tmp_path, change, columns, said):
    settings = written(tmp_path, patients().assign(**change), columns=columns) | {"feature_scale": 200}
    with pytest.raises(DpshardError, match=said) as error:
        load(resolve(settings))
    assert POISON not in str(error.value)
    assert "13.01" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pressure": [f"{i % 40},5" for i in range(60)]}, "'pressure' look like numbers"),
        ({"visit": [f"{1 + i % 28}.01.2020" for i in range(60)]}, "'visit' look like numbers"),
    ],
)
def test_numbers_of_another_format_are_no_categories_by_accident(tmp_path, change, said):
    source = written(tmp_path, patients().assign(**change), columns={}) | {"feature_scale": 200}
    with pytest.raises(DpshardError, match=said):
        load(resolve(source))
    (column,) = change
    source = written(tmp_path, patients().assign(**change), columns={column: "category"}) | {"feature_scale": 200}
    assert load(resolve(source)).fitted.encoder.columns[column].kind == "category"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("option", [{}, {"group_column": "patient"}, {"drop": "ward"}])
@pytest.mark.parametrize("cells", [["Ann", "Oslo", "yes"], ["Ann", "1950-03-02", "17.5"], ["Ann", "7", "f"]])
def test_no_error_shows_the_first_row_of_a_file_without_a_header(tmp_path, separator, option, cells):
    path = tmp_path / "x.csv"
    path.write_text("".join(separator.join(row) + "\n" for row in [cells, ["Bob", "Rome", cells[2]]] * 3))
    for label in ("outcome", cells[2]):
        with pytest.raises(DpshardError) as error:
            load(resolve({"data": str(path), "label_column": label, "feature_scale": 1} | option))
        assert not [
            cell for cell in cells[:2] if f"{cell}{separator}" in str(error.value) or repr(cell) in str(error.value)
        ]


@pytest.mark.parametrize("header", ["age,age,label", ",age,label", "age, age,label"])
def test_columns_without_a_name_of_their_own_are_refused(tmp_path, header):
    (tmp_path / "x.csv").write_text(f"{header}\n1,2,yes\n3,4,no\n")
    with pytest.raises(DpshardError, match="line 1: every column needs its own name"):
        load(resolve({"data": str(tmp_path / "x.csv"), "feature_scale": 1}))


def test_weights_of_texts_are_refused(tmp_path):
    (tmp_path / "x.csv").write_text("text,label\n" + "a,yes\nb,no\n" * 20)
    for weights in ("balanced", "yes=3"):
        with pytest.raises(ConfigurationError, match="not for texts"):
            load(resolve({"data": str(tmp_path / "x.csv"), "class_weights": weights, "target_epsilon": 3}))


def test_balanced_weights_without_a_budget_are_explained(tmp_path):
    source = written(tmp_path, patients(), columns=COLUMNS | {"pressure": [0, 300]})
    with pytest.raises(ConfigurationError, match="private counts"):
        load(resolve(source | {"class_weights": "balanced", "noise_multiplier": 1.0}))


def test_semicolons_are_guessed(tmp_path):
    settings = written(tmp_path, patients())
    path = tmp_path / "x.csv"
    path.write_text(path.read_text().replace(",", ";"))
    with pytest.raises(DpshardError, match="semicolons"):
        load(resolve(settings))
