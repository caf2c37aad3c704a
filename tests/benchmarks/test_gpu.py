"""The parts of the benchmark for one GPU, on the CPU at tiny sizes: they parse, resume, time out, and make a table."""

import json
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import gpu, kernels, measure, results_files, zero
from benchmarks.cli import app
from dpshard.errors import ConfigurationError

RATIO = {"median": 1.25, "low": 1.2, "high": 1.3}


@pytest.fixture
def measured(monkeypatch):
    """What is asked of the measurements, which are not taken."""
    asked = []

    def staged(workload, stages, clippings, setting, advance):
        asked.append((workload.name, setting))
        row = {"stage": "fsdp2", "throughput": RATIO, "seconds": {"median": 0.5}, "memory": 1.5}
        rows = [{**row, "clipping": clipping} for clipping in clippings]
        return {"workload": {"name": workload.name}, "setting": zero.asdict(setting), "rows": rows}

    def timed(workload, names, settings, advance):
        asked.append((workload.name, settings))
        contenders = [{"name": name, "ratio": RATIO, "seconds": {"median": 0.5}} for name in names[:3]]
        contenders.append({"name": names[3], "error": "pip install it"})
        return {"workload": {"name": workload.name}, "contenders": contenders}

    monkeypatch.setattr(zero, "measure", staged)
    monkeypatch.setattr(measure, "measure", timed)
    monkeypatch.setattr("benchmarks.cli._report", lambda figures: None)
    monkeypatch.setattr("benchmarks.cli.report", lambda out: None)
    return asked


def test_every_part_is_a_command_and_its_results_are_in_the_table(measured, tmp_path):
    for part in gpu.PARTS:
        command = [*part.command, "--device", "cuda", "--out", str(tmp_path / part.name)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        name, settings = measured[-1]
        assert part.name.startswith(name)
        assert settings.device == "cuda"
        if part.command[0] == "zero":
            assert (settings.precision, settings.ranks) == ("bf16", 1)
            assert settings.compiled == part.name.endswith("compiled")
    text = gpu.write(tmp_path, {"G9": "out of\nmemory"}).read_text()
    assert "| G2-eager | layer-wise | 1.25 | 1.20–1.30 | 500.0 | 1.50 |" in text
    assert "| G2-peers | dpshard:all-layer | 0.80 | 0.77–0.83 | 500.0 |" in text
    assert "| G1-peers | opacus:ghost | not timed: pip install it |" in text
    assert "- G9 failed: out of memory" in text
    assert "not measured" not in text
    assert (
        f"- not measured yet: {', '.join(part.name for part in gpu.PARTS)}"
        in gpu.write(tmp_path / "new", {}).read_text()
    )
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == sum(
        3 if part.name.endswith("eager") else 2 if part.name.endswith("compiled") else 3 for part in gpu.PARTS
    )


def test_the_table_says_which_kernels_passed_their_self_test(monkeypatch, tmp_path):
    def warn():
        warnings.warn("The Triton kernel row_norm_sq gives\nwrong results.", stacklevel=1)
        return False

    tests = {"noise": lambda: True, "rows": warn, "products in float16": lambda: False}
    monkeypatch.setattr(kernels.dispatch, "self_tests", lambda device: tests)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a worker
        assert CliRunner().invoke(app, ["kernels", "--out", str(tmp_path / gpu.SELF_TEST.name)]).exit_code == 0
    text = gpu.write(tmp_path, {}).read_text()
    why = "The Triton kernel row_norm_sq gives wrong results."
    assert f"passed their self-test: noise. Others: rows ({why}), products in float16 (not used).\n" in text
    found = json.loads((tmp_path / "gpu.json").read_text())["kernels"]
    assert found["noise"] == "passed"
    assert "row_norm_sq" in found["rows"]


def test_the_self_test_of_kernels_is_a_part_that_finds_none_on_a_cpu(tmp_path):
    assert gpu.run([gpu.SELF_TEST], tmp_path, device="cpu", tiny=True, say=lambda line: None) == {}
    gpu.write(tmp_path, {})
    found = json.loads((tmp_path / "gpu.json").read_text())["kernels"]
    assert set(found.values()) == {"not used"}
    assert "have no result" in gpu.write(tmp_path / "empty", {}).read_text()


def test_a_part_that_fails_or_takes_too_long_stops_no_other(monkeypatch, tmp_path):
    (tmp_path / "done").mkdir()
    (tmp_path / "done/x.json").write_text('{"kind": "zero"}')
    parts = [
        gpu.Part("wrong", ("run", "W9"), 1),
        gpu.Part("slow", ("noise",), 1e-4),
        gpu.Part("done", ("never",), 1),
    ]
    said = []
    failures = gpu.run(parts, tmp_path, device="cpu", tiny=True, say=said.append)
    assert failures.keys() == {"wrong", "slow"}
    assert "W9" in failures["wrong"]
    assert "longer" in failures["slow"]
    assert said[-1] == "done: has results, skipped"


def test_no_part_begins_that_may_take_longer_than_is_left(tmp_path):
    parts, said = [gpu.Part("long", ("never",), 4.6), gpu.SELF_TEST], []
    assert gpu.run(parts, tmp_path, device="cpu", tiny=True, say=said.append, minutes=4.5) == {}
    assert said == [
        "long: left for the next run, because it may take 4.6 minutes, and fewer are left",
        "kernels: at most 4 minutes",
    ]


def test_another_json_file_is_not_a_finished_part(tmp_path):
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/trace.json").write_text('{"kind": "profile"}')
    part = gpu.Part("wrong", ("run", "W9"), 1)
    assert gpu.run([part], tmp_path, device="cpu", tiny=True, say=lambda line: None).keys() == {"wrong"}


def test_the_output_of_a_part_that_takes_too_long_is_reported(monkeypatch, tmp_path):
    """The command prints, leaves a child that holds its pipe, and sleeps."""
    (tmp_path / "python").write_text("#!/bin/sh\necho step 3\nsleep 60 &\nsleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    failures = gpu.run([gpu.Part("slow", (), 1 / 40)], tmp_path, device="cpu", tiny=True, say=lambda line: None)
    assert failures == {"slow": "it took longer than 1.5 s: step 3"}


def test_parts_are_listed_and_a_missing_gpu_is_said(monkeypatch):
    listed = CliRunner().invoke(app, ["gpu", "--list"])
    assert listed.exit_code == 0
    assert all(part.name in listed.output for part in gpu.PARTS)
    assert "G9" in CliRunner().invoke(app, ["gpu", "--part", "G9"]).output
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    without = CliRunner().invoke(app, ["gpu"])
    assert without.exit_code != 0
    assert "no GPU" in without.output


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_each_part_of_make_gpu_runs_alone_and_prints_its_failures_at_its_limit():
    text = (results_files.ROOT / "Makefile").read_text("utf-8")
    *tests, benchmark = re.search(r"^GPU_ORDER := (.*)$", text, re.MULTILINE)[1].split()
    for part in (*tests, benchmark):
        command = ["make", "-n", "--no-print-directory", "-o", "gpu-site", "DEVICE=cuda", f"gpu-{part}"]
        shown = subprocess.run(command, cwd=results_files.ROOT, capture_output=True, text=True, check=True).stdout
        assert len(shown.splitlines()) == 1
        assert ("timeout -s INT" in shown) == (part != benchmark)
        assert ("DPSHARD_TEST_DEVICE=cuda" in shown) == part.startswith("oracles")


def test_without_matplotlib_there_are_tables(monkeypatch, tmp_path):
    def draw(folder):
        raise ConfigurationError("no matplotlib")

    monkeypatch.setattr("benchmarks.plots.draw", draw)
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "no matplotlib" in result.output
    assert (tmp_path / "README.md").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["G2-compiled", "G1-peers"])
def test_a_part_runs_on_the_cpu_at_tiny_size(tmp_path, name, monkeypatch):
    """In two rounds instead of ten, and with one style of clipping: each style compiles the model again.

    The default back-end of torch.compile calls a C++ compiler, which is not what a part is tested for.
    """
    (tmp_path / "sitecustomize.py").write_text('import torch\ntorch.compile.__kwdefaults__["backend"] = "aot_eager"\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    part = next(part for part in gpu.PARTS if part.name == name)
    command = ["2" if word == "10" else word for word in part.command]
    if "zero" in command:
        place = command.index("all-layer")
        del command[place - 1 : place + 1]
    monkeypatch.setattr(gpu, "PARTS", [replace(part, command=tuple(command))])
    command = ["gpu", "--part", name, "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "cpu-tiny/README.md").read_text()  # not where a GPU's results go
    assert text.startswith("# A trial on the CPU\n")
    assert f"| {name} | " in text
