"""The fixed cost of a step: counts that repeat, times beside the ordinary step, and a table."""

import json

from typer.testing import CliRunner

from benchmarks import fixed_cost
from benchmarks.cli import app


def test_times_and_counts_of_eager_steps_are_written(tmp_path):
    command = ["fixed-cost", "-p", "eager", "-s", "layer-wise", "--tiny", "--rounds", "2", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert "| eager, layer-wise | " in outcome.output
    assert "### The fixed cost of a step" in (tmp_path / "README.md").read_text("utf-8")
    (depth,) = json.loads((tmp_path / "fixed-cost.json").read_text())["depths"]
    ordinary, private = depth["steps"]
    assert ordinary["ratio"]["median"] == 1
    assert private["calls"] > ordinary["calls"] > 0
    assert private["operators"] > ordinary["operators"] > 0


def test_every_call_of_a_python_function_counts():
    def inner():
        return len([])

    assert fixed_cost.python_calls(lambda: [inner(), inner()]) == 3
