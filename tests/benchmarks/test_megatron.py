"""The planner beside Megatron-LM's table: the page shows what is planned, and the differences that it names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import megatron, results_files
from benchmarks.megatron import ROWS, Row

BY_SIZE = {f"{row.billions:g}": row for row in ROWS}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    (found,) = results_files.read(results_files.FOLDER, "megatron")
    return found


def test_the_page_shows_what_has_been_planned(figures: dict[str, Any]) -> None:
    text = megatron.PAGE.read_text("utf-8")
    assert megatron.page(text, figures) == text, "run `python -m benchmarks megatron`"
    assert [Row(**found["row"]) for found in figures["rows"]] == list(ROWS)


def test_the_rows_are_the_published_runs() -> None:
    """Their formula (2) gives the parameters, and pipelines, parts and samples make the batch."""
    for row in ROWS:
        h, layers = row.width, row.layers
        inner = 1 + 13 / (12 * h) + (megatron.VOCABULARY + megatron.SEQ) / (12 * layers * h)
        assert 12 * layers * h**2 * inner == pytest.approx(row.billions * 1e9, abs=0.05e9)
        assert row.parts * row.micro_batch * row.gpus == row.batch * row.tp * row.pp
        assert row.layers % (row.pp * row.chunks) == 0


@pytest.mark.parametrize("size", ["1.7", "39.1", "1008"])  # `python -m benchmarks megatron` plans all ten
@pytest.mark.exhaustive
def test_a_run_is_planned_again(figures: dict[str, Any], size: str) -> None:
    row = BY_SIZE[size]
    (found,) = (f for f in figures["rows"] if f["row"] == asdict(row))
    plan = row.plan()
    again = megatron.figures_of(row, plan, found["mfu"])
    assert again.pop("row") == found["row"]
    assert again == pytest.approx({name: value for name, value in found.items() if name != "row"})
    stages = plan.estimates[0].stages
    # The formula counts each product of a layer four times. The plan leaves out the recomputation of a layer's last
    # product, a twelfth of all, and counts one product of attention more: its kernel computes the scores once again.
    h, tokens = row.width, megatron.SEQ * row.micro_batch
    layer = 88 * tokens * h**2 + 18 * tokens * megatron.SEQ * h
    head = 6 * tokens * h * megatron.VOCABULARY
    counted = row.tp * sum(stage.forward + stage.backward for stage in stages)
    assert counted == pytest.approx(row.layers * layer + head, rel=1e-3)


def test_one_share_of_the_peak_predicts_small_runs_and_not_large_ones(figures: dict[str, Any]) -> None:
    """What docs/planning.md says of the differences."""
    ratios = {found["row"]["billions"]: found["planned"] / found["row"]["tflops"] for found in figures["rows"]}
    assert ratios[1.7] == pytest.approx(1)
    assert all(0.9 < ratio < 1 for size, ratio in ratios.items() if 1.7 < size < 20)
    assert all(0.7 < ratio < 0.9 for size, ratio in ratios.items() if size > 20)
    needed = [found["needed"] for found in figures["rows"]]
    assert needed[0] == pytest.approx(0.42, abs=0.01)
    assert 0.4 < min(needed) <= max(needed) < 0.62
