"""`dpshard train --shard`: the run of one process, on several; and what happens when one of them does not go along."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch

from dpshard.applications.cli import launch, train
from dpshard.applications.cli.run_folder import RunFolder
from dpshard.applications.cli.settings import resolve
from tests.applications.cli.conftest import NO_PICTURES, no_pictures
from tests.applications.cli.test_train import metrics, report, wait_for_steps, weights
from tests.extras import needs_deepspeed
from tests.forks import Forked
from tests.grids import quick
from tests.sums import taken_for_equal

STEPS = 12
FLAGS = f"--steps {STEPS} --batch-size 64 --noise-multiplier 1 --evaluations 3 --micro-batch-size 20".split()
ROOT = Path(__file__).parents[3]


EQUAL_SUMS = """
import dpshard.noise.digest, torch
dpshard.noise.digest.SumDigest.part = lambda self, shards: torch.zeros(2, dtype=torch.int64)
"""
"""What `taken_for_equal` does, in ranks: the sums of a sharded run are those of one process but for rounding."""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory):
    everywhere = tmp_path_factory.mktemp("everywhere")
    ranks = "if {'RANK', 'SLURM_PROCID'} & os.environ.keys():"
    (everywhere / "sitecustomize.py").write_text(f"import os\n{ranks}{indent(EQUAL_SUMS + NO_PICTURES, '    ')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(everywhere), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with taken_for_equal():
        yield


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch):
    """The launcher in this process forks its ranks, which need not import torch; torchrun starts Python."""
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, with its checkpoint before the first step, so that others can have its secret."""
    from typer.testing import CliRunner

    from dpshard.applications.cli import app

    folder = tmp_path_factory.mktemp("runs") / "alone"
    with taken_for_equal(), no_pictures():
        result = CliRunner().invoke(app, ["train", *FLAGS, "--checkpoint-every", "100", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def begun(alone, tmp_path):
    """The same run, before its first step; checkpoints are frequent."""
    folder = Path(shutil.copytree(alone, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
    for path in (folder / "report.json", folder / "report.md", folder / "model.pt"):
        path.unlink()
    (folder / "metrics.jsonl").write_text("")
    (folder / "checkpoints" / "releases.journal").write_bytes(b"")  # as if none of its steps had been released
    return folder


def assert_same_run(folder, other, *, killed=False):
    """After a kill, epsilon counts steps that the journal has and that are taken again; its last value is the same."""
    assert [row["step"] for row in metrics(folder)] == list(range(1, STEPS + 1))
    for row, expected in zip(metrics(folder), metrics(other), strict=True):
        if killed and "epsilon" in expected:
            assert expected.pop("epsilon") <= row.pop("epsilon") <= report(other)["privacy"]["epsilon"], row["step"]
        assert row == pytest.approx(expected, rel=2e-3, abs=1e-3), row["step"]
    assert report(folder)["privacy"] == report(other)["privacy"]
    for split in ("before", "after"):
        assert report(folder)["test"][split] == pytest.approx(report(other)["test"][split], abs=0.01)
    assert weights(folder).keys() == weights(other).keys()
    for name, weight in weights(other).items():
        torch.testing.assert_close(weights(folder)[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", quick("fsdp2", rest=["ddp"]))
@pytest.mark.exhaustive
def test_a_sharded_run_is_the_run_of_one_process(alone, begun, dpshard, capfd, how):
    dpshard("train", "--resume", begun, "--shard", how, "--nproc", 2)
    output, errors = capfd.readouterr()
    assert f"2 x cpu, {how}" in output
    assert output.count("Report, plots and weights") == 1  # one rank speaks
    assert errors == ""
    assert_same_run(begun, alone)
    assert report(begun)["ranks"] == 2
    assert (begun / "plots" / "overview.png").exists()


@pytest.mark.exhaustive
@needs_deepspeed
def test_a_run_by_deepspeed_is_stopped_and_killed_and_goes_on_at_another_stage(alone, begun, spawn, dpshard, capfd):
    process = spawn("train", "--resume", begun, "--shard", "deepspeed-2", "--nproc", 2)
    wait_for_steps(begun, 2, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    done = len(metrics(begun))
    process = spawn("train", "--resume", begun, "--shard", "deepspeed-3", "--nproc", 2)
    wait_for_steps(begun, done + 1, process)
    process.kill()
    process.wait()
    assert done < len(metrics(begun)) < STEPS
    dpshard("train", "--resume", begun, "--shard", "deepspeed-1", "--nproc", 2)
    output, errors = capfd.readouterr()
    assert f"Resuming after step {done} of {STEPS}" in output
    assert "2 x cpu, deepspeed-1" in output
    assert output.count("Report, plots and weights") == 1
    assert errors == ""
    assert_same_run(begun, alone, killed=True)
    for name, weight in weights(alone).items():  # to float32 rounding
        assert (weights(begun)[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.parametrize("number", quick(signal.SIGINT, rest=[signal.SIGTERM]))
@pytest.mark.exhaustive
def test_a_signal_saves_and_another_number_of_processes_goes_on(alone, begun, spawn, dpshard, capfd, number):
    process = spawn("train", "--resume", begun, "--shard", "fsdp2", "--nproc", 2)
    wait_for_steps(begun, 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert output.count(f"Resume with: dpshard train --resume {begun}") == 1
    assert "Traceback" not in output
    assert "rror" not in output
    done = len(metrics(begun))
    assert 3 <= done < STEPS
    dpshard("train", "--resume", begun, *(["--shard", "ddp", "--nproc", 3] if number == signal.SIGINT else []))
    output += capfd.readouterr().out
    if number == signal.SIGINT:
        assert f"Resuming after step {done} of {STEPS}" in output
    assert_same_run(begun, alone)


def sabotage(monkeypatch, tmp_path, code):
    """Have every rank run `code` at the beginning of each step; `rank` and `step` are known there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    from dpshard.applications.cli import training\n"
        "    original, rank = training.Run.take_step, int(os.environ['RANK'])\n"
        "    def take_step(self, logical_batch):\n"
        "        step = logical_batch.step\n"
        f"        {code}\n"
        "        return original(self, logical_batch)\n"
        "    training.Run.take_step = take_step\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))


FAILURES = {
    "a bug": ("if (rank, step) == (1, 3): 1 / 0", 1, "error: rank 1: ZeroDivisionError: division by zero"),
    "a refusal": (
        "from dpshard.errors import DataError\n        if (rank, step) == (1, 3): raise DataError('row 7 is empty')",
        2,
        "error: rank 1: row 7 is empty",
    ),
    "a refusal of all": (
        "from dpshard.errors import DataError\n        if step == 3: raise DataError('row 7 is empty')",
        2,
        "row 7 is empty",
    ),
    "a death": ("if (rank, step) == (1, 3): os.kill(os.getpid(), 9)", 1, "error: Rank 1 was killed by SIGKILL"),
    "a hang of the others": (
        "import time\n        if step == 3: time.sleep(600 * (1 - rank)); 1 / 0",
        1,
        "error: rank 1: ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize(
    "failure", quick("a bug", "a death", rest=["a refusal", "a refusal of all", "a hang of the others"])
)
def test_a_rank_that_fails_ends_the_run_with_one_error(tmp_path, monkeypatch, dpshard, capfd, failure):
    code, exit_code, message = FAILURES[failure]
    sabotage(monkeypatch, tmp_path, code)
    monkeypatch.setattr(launch, "PATIENCE", 3.0)
    started = time.monotonic()
    flags = [*FLAGS, "--out", tmp_path / "run", "--shard", "ddp", "--nproc", 2]
    launcher = dpshard("train", *flags, exit_code=exit_code)
    assert time.monotonic() - started < 90
    output, errors = capfd.readouterr()
    errors += launcher.stderr  # of the process that has started the ranks
    assert errors.count("error: ") == errors.count(message) == 1, errors
    assert "Traceback" not in output
    assert errors.count("Traceback") == (exit_code == 1 and failure != "a death")
    assert "onnection closed" not in errors


def test_ranks_do_not_outlive_their_launcher(tmp_path, monkeypatch, spawn):
    # At the first step alone: a file that is written anew at every step is empty at times.
    sabotage(
        monkeypatch, tmp_path, f"if step == 0: open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid()))"
    )
    process = spawn("train", *FLAGS, "--steps", 2000, "--out", tmp_path / "run", "--shard", "ddp", "--nproc", 2)
    wait_for_steps(tmp_path / "run", 2, process)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks go on training on their own"
        time.sleep(0.05)


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.exhaustive
def test_a_run_joins_torchrun(alone, begun):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = subprocess.run(
        [*command, "-m", "dpshard", "train", "--resume", begun, "--shard", "ddp"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("Report, plots and weights") == 1
    assert_same_run(begun, alone)


@pytest.mark.exhaustive
def test_a_run_joins_srun(alone, begun, tmp_path):
    printed = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ranks = []
    for rank, path in enumerate(printed):
        environment = {
            **os.environ,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
        }
        command = [sys.executable, "-m", "dpshard", "train", "--resume", begun, "--shard", "ddp"]
        with path.open("wb") as out:
            ranks.append(Forked(command, env=environment, stdout=out.fileno(), stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [path.read_text() for path in printed]
    assert codes == [0, 0], outputs
    assert "Report, plots and weights" in outputs[0]
    assert outputs[1] == ""
    assert_same_run(begun, alone)


def test_ranks_that_somebody_else_has_started_are_counted(tmp_path, monkeypatch, dpshard):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from dpshard.applications.cli import world
    from dpshard.backends.ranks import Ranks

    monkeypatch.setattr(world, "joined", lambda device: _two_ranks(Ranks()))
    assert "leave --nproc out" in dpshard("train", "--shard", "ddp", "--nproc", 3, exit_code=2).stderr
    for command in ("train", "audit"):
        assert "--shard fsdp2" in dpshard(command, exit_code=2).stderr


def test_a_run_of_two_processes_may_resume_on_as_many_as_torchrun_starts(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "run", resolve({"shard": "ddp", "nproc": 2})).path
    assert train.chosen(None, {}, run)[0].nproc == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert train.chosen(None, {}, run)[0].nproc is None
    assert train.chosen(None, {"nproc": 3}, run)[0].nproc == 3


def _two_ranks(ranks):
    from contextlib import nullcontext

    ranks.size = 2
    return nullcontext(ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "cnn", "--shard", "ddp"],
        ["--model", "vit", "--shard", "hsdp", "--clipping-style", "layer-wise"],
        ["--task", "pydoc", "--model", "gpt", "--max-length", 16, "--shard", "fsdp2", "--num-workers", 1],
        ["--task", "pydoc", "--model", "gpt2", "--max-length", 16, "--shard", "fsdp2", "--optimizer", "adamw"],
        ["--task", "pydoc", "--model", "gpt2", "--max-length", 16, "--shard", "ddp", "--clipping-mode", "ghost"],
    ],
    ids=lambda flags: "-".join(map(str, flags[1::2])),
)
def test_every_model_trains_on_two_processes(tmp_path, dpshard, flags):
    length = "--steps 2 --batch-size 16 --noise-multiplier 1 --evaluations 1".split()
    dpshard("train", *flags, *length, "--nproc", 2, "--out", tmp_path / "run")
    assert report(tmp_path / "run")["privacy"]["steps"] == 2
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())
