"""`dpshard train` from the outside: what it leaves behind, and how it survives being stopped anywhere."""

import json
import math
import os
import re
import shutil
import signal
import time
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from dpshard.applications.cli import models, training
from dpshard.applications.cli.run_folder import RunFolder
from tests.applications.cli.conftest import QUICK
from tests.grids import quick


def metrics(folder):
    """The metrics of a run but for the speed, which no two runs share."""
    rows = RunFolder.open(folder).read_metrics()
    return [{name: value for name, value in row.items() if name != "samples_per_second"} for row in rows]


def report(folder):
    return json.loads((folder / "report.json").read_text())


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    assert [row["step"] for row in metrics(one)] == list(range(1, len(metrics(one)) + 1))
    assert report(one)["privacy"] == report(other)["privacy"]
    assert report(one)["test"] == report(other)["test"]
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(other)[name]), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from typer.testing import CliRunner

    from dpshard.applications.cli import app

    folder = tmp_path_factory.mktemp("runs") / "finished"
    result = CliRunner().invoke(app, ["train", *QUICK, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder, result.stdout


def test_a_run_leaves_settings_metrics_checkpoints_plots_weights_and_report(finished):
    folder, output = finished
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"] == "mlp"
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "epsilon", "clip_fraction", "gradient_snr", "validation_accuracy"} <= metrics(folder)[-1].keys()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "releases.journal",
        "step-00000004",
        "step-00000006",
    ]
    for name in ("overview", "loss", "accuracy", "epsilon", "clip_fraction", "gradient_snr"):
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert weights(folder).keys() == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}
    assert "359 held-out samples" in output
    assert "commonest class" in output


def test_a_run_that_is_no_better_than_guessing_says_so(tmp_path, dpshard):
    output = dpshard("train", *QUICK, "--learning-rate", 1e-60, "--out", tmp_path / "run").stdout
    result = report(tmp_path / "run")["test"]
    assert result["after"]["accuracy"] <= result["guessing"]
    assert "no better than guessing" in output


def test_removed_checkpoints_are_not_taken_for_a_run_that_never_began(finished, tmp_path, dpshard):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    (folder / "report.md").unlink()
    assert "they were removed" in dpshard("train", "--resume", folder, exit_code=2).stderr


def test_the_report_states_the_whole_guarantee(finished):
    folder, _ = finished
    privacy = report(folder)["privacy"]
    assert privacy["neighbouring_relation"] == "add-or-remove-one"
    assert privacy["sampling"] == "Poisson"
    assert privacy["noise_multiplier"] == 1.0
    assert privacy["steps"] == 6
    assert privacy["phases"] == [{"expected_batch_size": 64, "sampling_probability": 64 / 1258, "steps": 6}]
    assert privacy["accountant"] == "pld"
    assert privacy["delta"] == 1e-5
    assert privacy["epsilon"] == metrics(folder)[-1]["epsilon"]
    text = (folder / "report.md").read_text()
    for part in ("add-or-remove-one", "Poisson", "sigma = 1", "q = 0.0508744", "6 steps", "pld", "1e-05", "not cover"):
        assert part in text


@pytest.mark.exhaustive
def test_a_run_of_balls_in_bins_says_so(tmp_path, dpshard):
    """Every training sample once an epoch; six steps are a part of an epoch of 20."""
    dpshard("train", *QUICK, "--sampling", "balls-in-bins", "--out", tmp_path / "run")
    privacy = report(tmp_path / "run")["privacy"]
    assert privacy["sampling"] == "balls-in-bins"
    assert privacy["neighbouring_relation"] == "zero-out"
    assert "6 releases in epochs of 20" in privacy["statement"]
    run = "--sample-size 1258 --batch-size 64 --steps 6 --sigma 1 --sampling balls-in-bins --json".split()
    assert privacy["epsilon"] == pytest.approx(json.loads(dpshard("account", *run).stdout)["answers"][0]["epsilon"])


def test_the_epsilon_of_a_run_is_that_of_account(finished, dpshard):
    run = "--sample-size 1258 --batch-size 64 --steps 6 --sigma 1 --accountant pld --json".split()
    answer = json.loads(dpshard("account", *run).stdout)["answers"][0]
    assert report(finished[0])["privacy"]["epsilon"] == pytest.approx(answer["epsilon"])


def test_plot_draws_a_run_again(finished, pictures, dpshard):
    folder = finished[0]
    shutil.rmtree(folder / "plots")
    output = dpshard("plot", folder).stdout
    assert "overview.png" in output
    assert all((folder / "plots" / f"{name}.png").exists() for name in ("overview", "loss", "epsilon"))


def test_resuming_a_finished_run_changes_nothing(finished, dpshard):
    folder = finished[0]
    before = metrics(folder), report(folder), weights(folder)
    assert "has finished already" in dpshard("train", "--resume", folder).stdout
    (folder / "report.md").unlink()  # as if it had been killed just before
    assert "Resuming after step 6 of 6" in dpshard("train", "--resume", folder).stdout
    assert metrics(folder) == before[0]
    assert report(folder) == before[1]
    assert all(torch.equal(weights(folder)[name], weight) for name, weight in before[2].items())


def test_flags_override_the_file(tmp_path, dpshard):
    settings = tmp_path / "settings.yaml"
    settings.write_text("model: cnn\nsteps: 5\nbatch_size: 16\nnoise-multiplier: 1\ntarget_delta: 1e-6\n")
    dpshard("train", "--config", settings, "--steps", 1, "--out", tmp_path / "run")
    privacy = report(tmp_path / "run")["privacy"]
    assert (report(tmp_path / "run")["model"], privacy["steps"], privacy["delta"]) == ("cnn", 1, 1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "vit", "--clipping-style", "layer-wise", "--clipping-quantile", 0.5],
        ["--model", "cnn", "--clipping-style", "block-wise", "--optimizer", "adamw", "--lr-schedule", "constant"],
        ["--model", "mlp", "--clipping-style", "param-wise", "--max-batch-size", "auto", "--secure-mode"],
        ["--task", "pydoc", "--model", "gpt", "--max-length", 16, "--optimizer", "adam", "--num-workers", 2],
        ["--recipe", "dp-bert", "--task", "pydoc", "--max-length", 16, "--micro-batch-size", 32],
        ["--phases", "16x1,32x1", "--clipping-fn", "abadi", "--accountant", "rdp", "--noise", "discrete-gaussian"],
    ],
)
def test_every_kind_of_run_comes_to_its_report(tmp_path, dpshard, flags):
    length = [] if "--phases" in flags else ["--steps", 2, "--batch-size", 16]
    dpshard("train", *flags, *length, "--noise-multiplier", 1, "--evaluations", 1, "--out", tmp_path / "run")
    assert report(tmp_path / "run")["privacy"]["steps"] == 2
    scores = report(tmp_path / "run")["test"]["after"]
    assert ("perplexity" in scores) == ("gpt" in flags)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["mlp", "vit"])
def test_the_demo_reads_88_percent_of_the_digits_at_epsilon_3(tmp_path, dpshard, model):
    before = os.times()
    dpshard("train", "--model", model, "--out", tmp_path / "run")
    result = report(tmp_path / "run")
    assert result["test"]["after"]["accuracy"] >= 0.88
    assert result["privacy"]["epsilon"] <= 3.0
    assert result["privacy"]["delta"] == 1e-5
    spent = [after - then for after, then in zip(os.times(), before, strict=True)]
    assert sum(spent[:4]) < 180  # seconds of this process and its children, whatever else runs


@pytest.mark.exhaustive
def test_the_language_model_learns_from_the_documentation(tmp_path, dpshard):
    dpshard("train", "--task", "pydoc", "--model", "gpt", "--steps", 30, "--out", tmp_path / "run")
    scores = report(tmp_path / "run")["test"]
    assert scores["before"]["perplexity"] > 200
    assert scores["after"]["perplexity"] < 40


# --- stopped and resumed ------------------------------------------------------------------------------------------

LONG = "--steps 40 --batch-size 64 --noise-multiplier 1 --evaluations 4 --checkpoint-every 5".split()


def wait_for_steps(folder, count, process):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    pytest.fail(f"no {count} steps in time")


IN_ORDER = "--sampling fixed-order --correlation banded-inverse --bands 4"
BUFFERED = "--sampling cyclic-poisson --correlation band-mf --bands 3 --buffers"


@pytest.mark.parametrize("options", quick("", rest=[IN_ORDER, BUFFERED]))
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path, spawn, known_secret, dpshard, options):
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    run = [*LONG, *options.split()]
    process = spawn("train", *run, "--out", killed)
    wait_for_steps(killed, 12, process)
    process.kill()
    process.wait()
    assert len(metrics(killed)) < 40
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # as if it had died while writing
    dpshard("train", "--resume", killed)
    dpshard("train", *run, "--out", undisturbed)
    assert_same_run(killed, undisturbed)


@pytest.mark.parametrize("number", quick(signal.SIGINT, rest=[signal.SIGTERM]))
@pytest.mark.exhaustive
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, spawn, known_secret, dpshard, number):
    folder = tmp_path / "stopped"
    process = spawn("train", *LONG, "--out", folder, "--num-workers", 1)
    wait_for_steps(folder, 3, process)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"dpshard train --resume {folder}" in output
    assert "Traceback" not in output
    done = len(metrics(folder))
    assert (folder / "checkpoints" / f"step-{done:08d}").exists()
    resumed = dpshard("train", "--resume", folder).stdout
    assert f"Resuming after step {done} of 40" in resumed
    assert [row["step"] for row in metrics(folder)] == list(range(1, 41))


def stop_after(steps, monkeypatch):
    """Have the run believe that a signal comes during a step."""
    asked = []

    class Stops(list):
        def __bool__(self):
            asked.append(None)
            return len(asked) >= steps

    @contextmanager
    def stop_requests():
        yield Stops()

    monkeypatch.setattr(training, "stop_requests", stop_requests)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_dropout_optimizer_and_schedule_go_on_bit_for_bit(tmp_path, monkeypatch, known_secret, dpshard, optimizer):
    build = models.build
    monkeypatch.setattr(models, "build", lambda *args: nn.Sequential(nn.Dropout(0.3), build(*args)))
    flags = [*QUICK, "--optimizer", optimizer, "--checkpoint-every", 100]
    stopped, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        dpshard("train", *flags, "--out", stopped, exit_code=130)
    torch.manual_seed(123)  # whatever happened in between
    dpshard("train", "--resume", stopped)
    dpshard("train", *flags, "--out", undisturbed)
    assert_same_run(stopped, undisturbed)


@pytest.mark.exhaustive
def test_the_bands_that_a_run_chose_stay(tmp_path, monkeypatch, known_secret, dpshard):
    """The run folder has the number that `dpshard account` chooses, and a resume does not choose again."""
    length = "--batch-size 64 --steps 6 --target-epsilon 8 --sampling fixed-order --correlation band-mf".split()
    flags = [*length, "--evaluations", 1, "--buffers"]
    stopped, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    chosen = json.loads(dpshard("account", "--sample-size", 1258, *length, "--bands", "auto", "--json").stdout)
    bands = re.search(r"bands=(\d+)", chosen["plan"]["noise_correlation"])[1]
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        dpshard("train", *flags, "--bands", "auto", "--out", stopped, exit_code=130)
    assert yaml.safe_load((stopped / "config.yaml").read_text())["bands"] == bands
    with monkeypatch.context() as patch:
        patch.setattr("dpshard.applications.cli.correlated.parse", None)
        dpshard("train", "--resume", stopped)
    dpshard("train", *flags, "--bands", bands, "--out", undisturbed)
    assert_same_run(stopped, undisturbed)
    assert report(stopped)["privacy"]["noise_correlation"].endswith("buffers=True)")


def test_a_run_without_matplotlib_still_has_its_report(tmp_path, spawn):
    process = spawn("train", *QUICK, "--out", tmp_path / "run", driver="import sys; sys.modules['matplotlib'] = None; ")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "dpshard[plots]" in output
    assert (tmp_path / "run" / "report.md").exists()


@pytest.mark.filterwarnings("default")
def test_a_plot_that_cannot_be_drawn_does_not_cost_the_report(tmp_path, monkeypatch, pictures, dpshard):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpshard.applications.cli.plots.save", full)
    told = dpshard("train", *QUICK, "--out", tmp_path / "run").stderr
    assert re.search("No plot was drawn: .*No space left", told)
    assert (tmp_path / "run" / "report.md").exists()


@pytest.mark.filterwarnings("default")
def test_a_budget_that_repeated_steps_have_spent_ends_the_run_with_its_report(tmp_path, monkeypatch, dpshard):
    """Another loss stands for other ranks: the steps since the checkpoint are second releases."""
    flags = "--steps 6 --batch-size 1000 --accountant rdp --evaluations 2 --checkpoint-every 4 --model mlp".split()
    folder, step = tmp_path / "run", training.Run.take_step

    def killed(self, logical_batch):
        if logical_batch.step == 2:
            raise ZeroDivisionError("crash")
        return step(self, logical_batch)

    monkeypatch.setattr(training.Run, "take_step", killed)
    with pytest.raises(ZeroDivisionError, match="crash"):
        dpshard("train", *flags, "--out", folder)
    monkeypatch.setattr(training.Run, "take_step", step)
    other_losses = lambda logits, y: 0.999 * F.cross_entropy(logits, y, reduction="none")  # noqa: E731
    monkeypatch.setattr(training, "sample_losses", other_losses)
    told = " ".join(dpshard("train", "--resume", folder).stderr.split())
    assert "Step 1 was released before, with other or unknown sums" in told
    assert "The run ends here: Step 4 would spend more" in told
    assert "5 releases (2 of them of steps that were taken again" in (folder / "report.md").read_text()


def test_two_runs_share_no_randomness_but_the_seed(tmp_path, dpshard):
    for name in ("one", "other"):
        dpshard("train", *QUICK, "--out", tmp_path / name)
    one, other = (metrics(tmp_path / name) for name in ("one", "other"))
    assert [row["realised_batch_size"] for row in one] != [row["realised_batch_size"] for row in other]


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_missing_deepspeed_is_said_before_anything_starts(tmp_path, monkeypatch, dpshard):
    monkeypatch.setattr("dpshard.applications.cli.sharding.find_spec", lambda name: None)
    error = dpshard("train", "--shard", "deepspeed-2", "--out", tmp_path / "run", exit_code=2).stderr
    assert 'pip install --no-build-isolation "dpshard[deepspeed]"' in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--target-epsilon", "-1"], "target_epsilon"),
        (["--target-epsilon", "0"], "target_epsilon"),
        (["--target-delta", "1.5"], "target_delta"),
        (["--target-delta", "0"], "target_delta"),
        (["--noise-multiplier", "-1"], "noise_multiplier"),
        (["--batch-size", "5000"], "larger than the data set"),
        (["--steps", "0"], "at least one step"),
        (["--steps", "5", "--epochs", "5"], "exactly one"),
        (["--max-grad-norm", "0"], "max_grad_norm"),
        (["--clipping-mode", "magic"], "clipping_mode"),
        (["--model", "gpt"], "mlp"),
        (["--data", "nothing.csv"], "does not exist"),
        (["--device", "tpu9"], "tpu9"),
        (["--resume", "nowhere"], "not a run folder"),
        (["--resume", "nowhere", "--steps", "5"], "leave the other options out"),
        (["--out", "/dev/null/run"], "/dev/null/run"),
        (["--nproc", "2"], "--shard fsdp2"),
        (["--nproc", "0", "--shard", "ddp"], "at least 1"),
        (["--shard", "deepspeed-4"], "deepspeed-3"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        ([*IN_ORDER.split(), "--steps", "3"], "at most 3 bands"),
        ([*IN_ORDER.split(), "--buffers"], "leave --buffers out"),
        ([*IN_ORDER.split(), "--bands", "auto", "--noise-multiplier", "1"], "give --target-epsilon"),
        (["--bands", "auto"], "--correlation and --bands go together"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing_behind(tmp_path, monkeypatch, dpshard, wrong, word):
    monkeypatch.chdir(tmp_path)
    error = dpshard("train", *wrong, exit_code=2).stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert word in error
    assert list(tmp_path.iterdir()) == []


def test_a_delta_of_one_over_n_draws_a_warning_of_one_line(tmp_path, spawn):
    process = spawn("train", *QUICK, "--target-delta", 0.01, "--out", tmp_path / "run")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert [line.startswith("warning: target_delta=0.01") for line in output.splitlines()].count(True) == 1


def test_an_unknown_key_lists_the_known_ones(tmp_path, dpshard):
    settings = tmp_path / "settings.yaml"
    settings.write_text("epsilon: 3\n")
    assert "target_epsilon" in dpshard("train", "--config", settings, exit_code=2).stderr


def test_a_run_folder_that_exists_is_refused(finished, dpshard):
    assert "--resume" in dpshard("train", *QUICK, "--out", finished[0], exit_code=2).stderr


def test_a_checkpoint_of_another_run_is_refused(finished, tmp_path, dpshard):
    other = tmp_path / "other"
    dpshard("train", *QUICK, "--max-grad-norm", 2, "--out", other)
    for path in (other / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
        shutil.copytree(finished[0] / "checkpoints" / path.name, path)
    (other / "report.md").unlink()
    assert "max_grad_norm" in dpshard("train", "--resume", other, exit_code=2).stderr


def test_edited_settings_are_refused(finished, tmp_path, dpshard):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    config = folder / "config.yaml"
    (folder / "report.md").unlink()
    config.write_text(config.read_text().replace("noise_multiplier: 1.0", "noise_multiplier: 0.5"))
    assert "noise_multiplier" in dpshard("train", "--resume", folder, exit_code=2).stderr


def test_a_run_without_steps_has_no_plots_yet(finished, tmp_path, pictures, dpshard):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    assert "has not finished a step" in dpshard("plot", folder, exit_code=2).stderr
    (folder / "metrics.jsonl").write_text("no json\n")
    assert "damaged" in dpshard("plot", folder, exit_code=2).stderr


def test_a_run_on_units_names_what_it_protects(dpshard, tmp_path):
    """A patient with many records and one with few; an audit, which knows samples only, refuses the run."""
    lines = [f"p{i % 40 if i < 100 else 0},{i % 7},{i % 5},{i % 2}" for i in range(160)]
    source = tmp_path / "visits.csv"
    source.write_text("\n".join(["patient,a,b,label", *lines]))
    run = ["--data", source, "--group-column", "patient", "--rows-per-unit", 4, "--model", "mlp", "--feature-scale", 7]
    size = ["--steps", 2, "--batch-size", 8, "--micro-batch-size", 8, "--noise-multiplier", 1, "--evaluations", 1]
    dpshard("train", *run, *size, "--out", tmp_path / "run")
    privacy = report(tmp_path / "run")["privacy"]
    assert privacy["protected_unit"] == "one patient, up to 4 rows in a step"
    assert privacy["sample_size"] == 28
    assert all(math.isfinite(row["loss"]) for row in metrics(tmp_path / "run"))
    assert "units of several rows" in dpshard("audit", *run, exit_code=2).stderr
