"""Tables as numbers: public facts decide, no single cell does, and no error shows a cell."""

import datetime

import numpy as np
import pytest
import torch

from dpshard.applications.tabular import Encoder, parse_columns
from dpshard.errors import ConfigurationError, DataError, DpshardError

pandas = pytest.importorskip("pandas")

GIVEN = {
    "age": [0, 100],
    "admitted": [datetime.date(2020, 1, 1), datetime.date(2020, 1, 11)],
    "sex": ["f", "m"],
    "ward": {"categories": [1, 2]},
    "name": "drop",
}
TABLE = pandas.DataFrame(
    {
        "age": ["25", "", "200"],
        "admitted": ["2020-01-06", "2020-01-01", "never"],
        "sex": ["m", " f ", "x"],
        "ward": ["1", "2.5", None],
        "name": ["a", "b", "c"],
    }
)


def test_features_are_scaled_numbers_then_who_is_missing_then_categories():
    encoder = Encoder.of(TABLE, parse_columns(GIVEN))
    features = encoder.encode(TABLE)
    assert encoder.numbers == 2
    expected = [
        # age, date; missing; sex: missing, other, f, m; ward: missing, other, 1, 2
        [-0.5, 0.0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0],
        [0.0, -1.0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0],
        [1.0, 0.0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0],
    ]
    torch.testing.assert_close(features, torch.tensor(expected))


def test_kinds_are_those_of_most_cells():
    frame = pandas.DataFrame(
        {
            "n": ["1", "2", "three", "4"],
            "d": ["2020-01-01", "x", "2020-01-02T10:00", "2020-01-03"],
            "c": ["a", "b", "1", ""],
            "b": [True, False, True, True],
        }
    )
    kinds = {name: column.kind for name, column in Encoder.of(frame, {}).columns.items()}
    assert kinds == {"n": "number", "d": "date", "c": "category", "b": "number"}


def test_a_category_without_names_is_hashed_alike_in_every_table():
    one, other = (pandas.DataFrame({"c": cells}) for cells in (["x", "y", None], ["y", "never seen", "x"]))
    encoder = Encoder.of(one, {})
    first, second = encoder.encode(one), encoder.encode(other)
    assert torch.equal(first[0], second[2])
    assert torch.equal(first[1], second[0])
    assert first.sum(1).tolist() == [1, 1, 1]
    assert first[2, 0] == 1


def test_typed_columns_read_as_texts_do():
    typed = pandas.DataFrame({"a": [1.0, np.nan], "d": pandas.to_datetime(["2020-01-06", None])})
    text = pandas.DataFrame({"a": ["1", ""], "d": ["2020-01-06", ""]})
    given = parse_columns({"a": [0, 2], "d": GIVEN["admitted"]})
    assert torch.equal(Encoder.of(typed, given).encode(typed), Encoder.of(text, given).encode(text))


def test_private_bounds_fill_in_what_is_not_public():
    frame = pandas.DataFrame({"a": [1, 2], "b": [3, 4]})
    encoder = Encoder.of(frame, parse_columns({"a": [0, 2]}))
    assert encoder.unbounded == ["b"]
    assert encoder.unbounded_cells(frame).tolist() == [[3], [4]]
    with pytest.raises(ConfigurationError, match="b"):
        encoder.encode(frame)
    assert encoder.bounded(np.array([[2.0, 4.0]])).encode(frame).tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    "facts", [[1, 1], [2, 1], [1, float("inf")], [], ["a", "a"], "numbers", 3, {"names": [1]}, {"categories": []}]
)
def test_facts_that_say_nothing_are_refused_by_name(facts):
    with pytest.raises(ConfigurationError, match="columns: age"):
        parse_columns({"age": facts})


POISON = "POISON-4711"


@pytest.mark.parametrize(
    "given", [{}, {"a": "number"}, {"a": "date"}, {"a": ["x", "y"]}, {"zz": [0, 1]}, {"a": "drop"}]
)
def test_no_error_shows_a_cell(given):
    frame = pandas.DataFrame({"a": [POISON, "1", "2020-01-01"]})
    try:
        encoder = Encoder.of(frame, parse_columns(given))
        encoder.encode(frame)
    except DpshardError as error:
        seen = []
        while error is not None:
            seen.append(str(error))
            error = error.__cause__ or error.__context__
        assert POISON not in " ".join(seen)


def test_tables_without_columns_or_with_two_of_one_name_are_refused():
    with pytest.raises(DataError, match="no column to learn from"):
        Encoder.of(pandas.DataFrame({"a": [1]}), parse_columns({"a": "drop"}))
    with pytest.raises(DataError, match="one name"):
        Encoder.of(pandas.DataFrame([[1, 2]], columns=["a", "a"]), {})
    with pytest.raises(DataError, match="no column 'b'"):
        Encoder.of(pandas.DataFrame({"b": [1], "a": [1]}), parse_columns({"a": "drop", "b": [0, 1]})).encode(
            pandas.DataFrame({"a": [1]})
        )


def test_days_after_2262_and_before_1677_are_days_without_showing_a_cell():
    cells = ["9999-12-31", "0001-01-01", "1970-01-02", None]
    frame = pandas.DataFrame({"d": cells, "t": pandas.Series(cells[2:] * 2, dtype="datetime64[s]")})
    encoder = Encoder.of(frame, {})
    found = encoder.unbounded_cells(frame)
    assert found[:, 0].tolist()[:3] == [2932896, -719162, 1]
    assert np.isnan(found[3]).all()
    assert found[0, 1] == 1
