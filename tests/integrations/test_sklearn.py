"""Estimators for scikit-learn: their conventions, their guarantee, and what errors do not show."""

from functools import partial

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError, DataError
from dpshard.integrations.sklearn import PrivateClassifier, PrivateRegressor

pandas = pytest.importorskip("pandas")

QUICK = {"target_epsilon": 30.0, "target_delta": 1e-5, "batch_size": 64, "steps": 20, "bounds": (-10, 10)}

NOISE = "two fits differ by their noise"
WEAK = "20 steps under noise are too few for the score that it asks for"
UNMET = {
    "check_fit_idempotent": NOISE,
    "check_supervised_y_2d": NOISE,
    "check_classifier_data_not_an_array": NOISE,
    "check_regressor_data_not_an_array": NOISE,
    "check_regressors_int": NOISE,
    "check_classifiers_train": WEAK,
    "check_regressors_train": WEAK,
    "check_class_weight_classifiers": WEAK,
}
"""What no private estimator can promise; docs/tables.md lists it."""


@pytest.fixture(autouse=True)
def rdp(request, monkeypatch):
    """Calibrate in milliseconds where the accountant does not matter."""
    if "pld" in request.node.name:
        return
    monkeypatch.setattr("dpshard.integrations.sklearn.PrivacyEngine", partial(PrivacyEngine, accountant="rdp"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
@pytest.mark.exhaustive
def test_they_meet_the_conventions_of_estimators(kind):
    more = {} if kind is PrivateClassifier else {"target_bounds": (-300, 300)}
    estimator = kind(**QUICK | {"steps": 6}, **more, model="linear", random_state=0)
    found = check_estimator(estimator, expected_failed_checks=UNMET, on_skip=None, on_fail=None)
    failed = {check["check_name"] for check in found if check["status"] == "failed"}
    assert not failed, failed
    assert sum(check["status"] == "passed" for check in found) >= 40


def rows(count=200, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 3))
    return x, x[:, 0] + x[:, 1] > 0


@pytest.mark.exhaustive
def test_a_classifier_learns_within_its_budget_by_pld():
    x, y = load_breast_cancer(return_X_y=True)
    low, high = x.min(0), x.max(0)  # scikit-learn publishes both
    model = PrivateClassifier(bounds=(low, high), random_state=0).fit(x[:450], y[:450])
    assert model.score(x[450:], y[450:]) > 0.85
    assert 2.9 < model.epsilon_ <= 3.0
    assert f"{model.n_iter_} releases" in model.statement_
    assert "before them" not in model.statement_
    assert model.predict_proba(x[450:]).sum(1) == pytest.approx(np.ones(len(x) - 450))


def test_a_regressor_learns_with_private_bounds_of_everything():
    x, _ = rows(3000)
    y = 1000 + 50 * x[:, 0]
    model = PrivateRegressor(target_epsilon=8.0, target_delta=1e-5, batch_size=1500, steps=150, random_state=0)
    model.fit(x, y)
    assert model.score(x, y) > 0.8
    assert 7.9 < model.epsilon_ <= 8.0
    assert "1 releases about all samples before them" in model.statement_
    assert model.objective_.low < 1000 < model.objective_.high


def test_predictions_stay_within_the_public_bounds_of_the_target():
    x, _ = rows()
    model = PrivateRegressor(**QUICK, target_bounds=(-1, 1)).fit(x, 100 * x[:, 0])
    assert np.abs(model.predict(100 * x)).max() <= 1


def test_pipelines_clones_and_folds():
    x, y = rows()
    model = make_pipeline(FunctionTransformer(np.tanh), PrivateClassifier(**QUICK))
    scores = cross_val_score(clone(model), x, np.where(y, "yes", "no"), cv=2)
    assert scores.shape == (2,)
    assert clone(model).fit(x, y)[-1].epsilon_ <= 30.0


def test_a_table_of_numbers_categories_and_missing_cells():
    x, y = rows(600)
    frame = pandas.DataFrame({"a": x[:, 0], "b": np.where(x[:, 1] > 0, "high", "low"), "id": np.arange(600)})
    frame.loc[::7, ["a", "b"]] = None
    columns = {"a": [-3, 3], "b": ["high", "low"], "id": "drop"}
    settings = QUICK | {"bounds": None, "batch_size": 300, "steps": 60}
    model = PrivateClassifier(**settings, columns=columns, random_state=0).fit(frame, y)
    assert model.score(frame, y) > 0.75
    assert list(model.feature_names_in_) == ["a", "b", "id"]
    assert list(model.encoder_.columns) == ["a", "b"]


def test_groups_are_the_unit_of_privacy():
    x, y = rows(300)
    model = PrivateClassifier(**QUICK, rows_per_unit=4).fit(x, y, groups=np.arange(300) // 3)
    assert "one unit of up to 4 rows, of N = 100" in model.statement_


def test_public_classes_and_weights_move_predictions():
    x, y = rows(600)
    settings = QUICK | {"batch_size": 300, "steps": 60}
    shares = []
    for weight in (1, 20):
        model = PrivateClassifier(**settings, classes=[0, 1, 2], class_weight={1: weight}, random_state=0)
        shares.append((model.fit(x, y.astype(int)).predict(x) == 1).mean())
    assert model.predict_proba(x).shape == (600, 3)
    assert shares[1] > shares[0] + 0.1


def test_balanced_weights_find_a_rare_class_within_the_budget():
    random = np.random.default_rng(0)
    x = random.normal(size=(2000, 3))
    y = (x[:, 0] + 0.5 * random.normal(size=2000) > 1.5).astype(int)  # 8.7%
    settings = {"target_epsilon": 3.0, "target_delta": 1e-5, "bounds": (-3, 3), "batch_size": 500, "steps": 60}
    model = PrivateClassifier(**settings, model="linear", class_weight="balanced").fit(x, y)
    weights = model.objective_.weights
    assert weights[1] / weights[0] == pytest.approx(10.5, rel=0.3)
    assert model.epsilon_ <= 3
    assert "1 releases about all samples before" in model.statement_
    found = model.predict(x) == 1
    assert found[y == 1].mean() + (~found)[y == 0].mean() > 1.5  # without weights 1.0 to 1.1


def test_a_module_of_ones_own_is_copied():
    x, y = rows()
    own = nn.Linear(6, 2)
    before = own.weight.detach().clone()
    model = PrivateClassifier(**QUICK, model=own).fit(x, y)
    assert (own.weight == before).all()
    assert not (model.model_.weight == before).all()


POISON = "POISON-4711"


@pytest.mark.parametrize(
    ("settings", "poisoned"),
    [
        ({}, "x"),
        ({"columns": {"c": [0, 1]}}, "x"),
        ({"columns": {"c": ["a", "b"]}}, "x"),
        ({"classes": [0, 1]}, "y"),
        ({"classes": ["0", "1"], "class_weight": {POISON: 2.0}}, "z"),
    ],
)
def test_no_error_and_no_result_shows_a_cell(settings, poisoned):
    _, y = rows()
    frame = pandas.DataFrame({"c": np.where(y, "a", "b").astype(object), "d": 1.0})
    labels = np.where(y, "0", "1").astype(object)
    (frame.__setitem__("c", [POISON, *frame["c"][1:]])) if poisoned == "x" else labels.__setitem__(0, POISON)
    if poisoned == "z":
        labels = np.where(y, "0", "1")
    base = QUICK | {"bounds": None, "statistics_share": 0.3}
    try:
        model = PrivateClassifier(**base, **settings).fit(frame, labels)
        shown = repr(model.encoder_) + model.statement_
    except (DataError, ConfigurationError) as error:
        shown = str(error)
    assert POISON not in shown


@pytest.mark.parametrize("cells", [np.full(20, 4711.5), np.full((20, 2), 4711.5 + 1j), [4711.5] * 20])
def test_no_error_of_scikit_learn_shows_a_cell(cells):
    with pytest.raises(ValueError, match=r"2D array|Complex") as caught:
        PrivateClassifier(**QUICK).fit(cells, rows(20)[1])
    assert "4711" not in str(caught.value)


def test_ids_of_several_types_are_one_unit():
    x, y = rows(40)
    model = PrivateClassifier(**QUICK).fit(x, y, [1, 1.0, "1", "1 "] + [2] * 36)
    assert "N = 2," in model.statement_


def test_a_fit_that_stops_leaves_no_older_guarantee(monkeypatch):
    x, y = rows()
    model = PrivateClassifier(**QUICK).fit(x, y)
    monkeypatch.setattr(model, "_train", lambda *facts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y)
    assert not hasattr(model, "epsilon_")
    with pytest.raises(NotFittedError):
        model.predict(x)


@pytest.mark.parametrize("bounds", [("a", "b"), ["number"], 5, (1, 0)])
def test_bounds_of_a_target_are_two_numbers(bounds):
    x, _ = rows(20)
    with pytest.raises(ConfigurationError):
        PrivateRegressor(**QUICK, target_bounds=bounds).fit(x, x[:, 0])


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "tree"},
        {"bounds": (1, 0)},
        {"bounds": 3},
        {"columns": {"q": "drop"}},
        {"class_weight": "even"},
        {"steps": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(settings):
    x, y = rows(20)
    with pytest.raises((ConfigurationError, DataError)):
        PrivateClassifier(**(QUICK | settings)).fit(x, y)
