"""The measured fine-tuning runs to its end at a tiny size, and the documents show what it has measured."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.finetuning.results import table
from benchmarks.results_files import FOLDER, ROOT


@pytest.mark.exhaustive
def test_transformers_are_fine_tuned_in_shards(tmp_path):
    """A few steps of tiny models: that it runs to the end, and tells what was spent."""
    pytest.importorskip("peft")
    # By itself, as it is started by hand: it launches the processes.
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.finetuning", "--nproc", "2", "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads((tmp_path / "finetuning.json").read_text())
    assert table(results) in run.stdout
    assert (results["processes"], results["shard"]) == (2, "fsdp2")
    runs = {(run["model"], run["trained"]): run for run in results["runs"]}
    assert len(runs) == 4
    for (model, trained), run in runs.items():
        assert run["noise_multiplier"] == 1
        assert 1 < run["epsilon"] < 20
        assert run["steps"] == 2
        assert all(0 < loss < 10 for loss in run["loss"].values())
        assert trained == "all weights" or run["parameters"] < runs[model, "all weights"]["parameters"]


def test_the_page_shows_what_has_been_measured():
    results = json.loads((FOLDER / "finetuning.json").read_text())
    assert table(results) in (ROOT / "docs/integrations.md").read_text()
    assert len(results["runs"]) == 4
