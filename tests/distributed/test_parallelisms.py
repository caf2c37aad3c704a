"""The table of docs/model-parallel.md covers every kind and every pair of parallelism: by tests, or by a refusal.

Failure modes: 2 (one threshold for a sample, whatever ranks hold of it); 17 (one global draw).
"""

from itertools import combinations
from typing import Any

import pytest

from benchmarks import parallelisms, results_files
from benchmarks.parallelisms import KINDS, ROWS, Alternatives, Exact, Refused, case_of, cases_of, pairs_of
from tests.distributed.launch import shared
from tests.grids import chosen, covering

REFUSED = covering(
    ((row.ranks, case_of(pair), row.text) for row in ROWS if isinstance(row, Refused) for pair in row.pairs),
    lambda ranks, case, text: {text, *case.split("+")},
)
told = shared("pairs_worker.py", REFUSED, lambda ranks, case, _: (ranks, case), size=len(REFUSED))
ALONE = {(kind,) for kind in KINDS} - {("SP",)}  # which divides the norms of tensor parallelism


def uncovered(rows: tuple[Exact | Refused | Alternatives, ...]) -> set[tuple[str, ...]]:
    """Kinds and pairs without a row."""
    wanted: set[tuple[str, ...]] = {*ALONE, *combinations(KINDS, 2)}
    return wanted - {pair for row in rows for pair in pairs_of(row)}


def test_every_kind_and_every_pair_has_a_row() -> None:
    assert not uncovered(ROWS)
    for row in ROWS:
        assert set(pairs_of(row)) <= ALONE | set(combinations(KINDS, 2))


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Exact)], ids=str)
def test_an_exact_row_names_cases_of_the_tests(row: Exact) -> None:
    assert cases_of(row)


def test_a_pair_without_a_test_or_a_refusal_is_noticed() -> None:
    without = tuple(row for row in ROWS if ("TP", "CP") not in pairs_of(row))
    assert ("TP", "CP") in uncovered(without)
    assert not cases_of(Exact(("TP", "CP"), "tensor_parallel", "tp-cp:.*"))


@pytest.mark.parametrize(("ranks", "case", "text"), REFUSED)
def test_a_pair_that_no_test_holds_is_refused(ranks: int, case: str, text: str) -> None:
    if "zero" in case:
        pytest.importorskip("deepspeed")
    for message in told(ranks, case, text):
        assert message.startswith(text)


def test_only_wrappers_of_data_ranks_are_alternatives() -> None:
    pairs = {pair for row in ROWS if isinstance(row, Alternatives) for pair in row.pairs}
    assert pairs <= set(combinations(("DDP", *parallelisms.ZERO), 2))


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    (found,) = results_files.read(results_files.FOLDER, "parallelisms")
    return found


def test_the_page_shows_what_has_been_measured(figures: dict[str, Any]) -> None:
    text = parallelisms.PAGE.read_text("utf-8")
    assert parallelisms.page(text, figures) == text, "run `python -m benchmarks parallelisms`"


def test_measured_rows_are_those_of_the_table(figures: dict[str, Any]) -> None:
    """And every error is below the bound of its test: DeepSpeed's partitions are float32."""
    for row, found in zip(ROWS, figures["rows"], strict=True):
        assert [tuple(pair) for pair in found["pairs"]] == pairs_of(row)
        if isinstance(row, Refused):
            assert set(found["messages"]) == {row.text}
        if isinstance(row, Exact):
            assert all(one["error"] <= (1e-6 if row.suite == "deepspeed" else 1e-12) for one in found["cases"])


@pytest.mark.parametrize("name", chosen(parallelisms.SETUPS, "HSDP, nodes of 8"))
@pytest.mark.exhaustive
def test_bytes_are_counted_again(figures: dict[str, Any], name: str) -> None:
    """On one of 256 ranks, and not more than 6 in 10,000 beyond ordinary training."""
    rows = parallelisms.traffic({name: parallelisms.SETUPS[name]})[name]
    assert rows == figures["traffic"][name]
    sums = [sum(row[style][1] for row in rows) for style in ("ordinary", *parallelisms.STYLES[:3])]
    assert max(sums) <= 1.0006 * sums[0]
