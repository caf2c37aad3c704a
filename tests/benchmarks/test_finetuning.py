"""The measured fine-tuning runs to its end at a tiny size, and the documents show what it has measured."""

import json
import sys

import pytest

from benchmarks.finetuning.results import table
from benchmarks.results_files import FOLDER, ROOT
from tests.distributed.launch import prints


@pytest.mark.exhaustive
def test_transformers_are_fine_tuned_in_shards(tmp_path, monkeypatch):
    """A few steps of tiny models: that it runs to the end, and tells what was spent."""
    pytest.importorskip("peft")
    from benchmarks.finetuning import __main__ as command

    # It has torchrun start the ranks, which are forked here.
    started = []
    monkeypatch.setattr(command.subprocess, "call", started.append)
    monkeypatch.setattr(sys, "argv", ["finetuning", "--nproc", "2", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    torchrun, rank = started[0][:5], started[0][5:]
    assert torchrun == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    rank.remove("--")  # which ends torchrun's own options
    printed, _ = prints([sys.executable, *rank], 2)
    results = json.loads((tmp_path / "finetuning.json").read_text())
    assert table(results) in printed
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
