"""`dpshard audit` from the outside: what it prints and leaves behind, on one process and two, and what it refuses."""

import hashlib
import itertools
import json

import pytest
import torch

from dpshard.applications.cli import auditing, models, tasks
from dpshard.applications.cli.fitting import fit
from dpshard.applications.cli.settings import resolve
from dpshard.backends.ranks import Ranks
from tests.applications.audit import faults
from tests.applications.cli.conftest import QUICK
from tests.extras import needs_deepspeed
from tests.grids import quick

pytestmark = pytest.mark.usefixtures("coarse_losses")


@pytest.fixture
def known_secret(monkeypatch):
    """One for every engine, always the same ones: an audit asks whether two engines draw the same."""
    numbers = itertools.count()
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: hashlib.sha256(str(next(numbers)).encode()).digest())


FAST = "--trials 60 --canaries 100".split()
SETTINGS = "--steps 4 --noise-multiplier 1 --device cpu".split()


@pytest.fixture
def written(tmp_path):
    def read():
        return json.loads((tmp_path / "audit.json").read_text())

    return read


@pytest.mark.usefixtures("known_secret")
def test_a_sound_configuration_passes(dpshard, tmp_path, written):
    output = dpshard("audit", *FAST, *SETTINGS, "--json", tmp_path / "audit.json").stdout
    assert output.count("consistent") == 3
    releases, step, run = written()["releases"], written()["step"], written()["run"]
    assert (releases["steps"], releases["samples"], releases["fault"]) == (120, 8, None)
    assert 0 < step["lower_bound"] < step["accounted"]
    assert step["mu_lower_bound"] < step["mu_accounted"] == 2
    assert 0 < run["lower_bound"] < run["accounted"]
    assert (run["canaries"], run["steps"], run["sample_size"]) == (100, 4, 1258 + 100)


@pytest.mark.usefixtures("known_secret")
@pytest.mark.parametrize("model", quick(["--model", "cnn"], rest=[["--task", "pydoc", "--model", "gpt"]]))
@pytest.mark.exhaustive
def test_input_canaries_of_any_model(dpshard, tmp_path, written, model):
    flags = "--trials 20 --canaries 10 --canary-kind input --steps 2 --noise-multiplier 1 --batch-size 64".split()
    dpshard("audit", *flags, *model, "--json", tmp_path / "audit.json")
    assert written()["run"]["kind"] == "input"
    assert not written()["run"]["refuted"]
    assert not written()["step"]["refuted"]


@pytest.mark.usefixtures("known_secret")
@pytest.mark.exhaustive
def test_a_fault_is_said_and_has_an_exit_code_of_its_own(dpshard, tmp_path, written, monkeypatch):
    faults.weaken_noise(monkeypatch, 3)
    flags = ["--trials", 160, "--canaries", 0, *SETTINGS, "--clipping-style", "layer-wise"]
    output = dpshard("audit", *flags, "--json", tmp_path / "audit.json", exit_code=3).stdout
    assert "REFUTED" in output
    assert written()["step"]["refuted"]
    assert "run" not in written()


@pytest.mark.usefixtures("known_secret")
@pytest.mark.exhaustive
def test_the_audit_of_a_run_stays_with_it(dpshard, tmp_path):
    folder = tmp_path / "run"
    dpshard("train", *QUICK, "--clipping-fn", "global", "--max-grad-norm", 4, "--out", folder)
    dpshard("audit", folder, "--trials", 100, "--canaries", 100)
    figures = json.loads((folder / "audit.json").read_text())
    assert figures["step"]["mu_lower_bound"] > 1  # clipping drops no canary
    assert figures["run"]["steps"] == 6
    assert figures["run"]["noise_multiplier"] == 1
    assert "leave the other" in dpshard("audit", folder, "--steps", 5, exit_code=2).stderr


@pytest.mark.parametrize("shard", ["fsdp2", pytest.param("deepspeed-3", marks=needs_deepspeed)])
@pytest.mark.exhaustive
def test_the_audit_of_a_sharded_configuration(spawn, tmp_path, written, shard):
    flags = ["--trials", 30, "--canaries", 100, *SETTINGS, "--shard", shard, "--nproc", 2]
    process = spawn("audit", *flags, "--json", tmp_path / "audit.json")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert written()["ranks"] == 2
    assert not written()["step"]["refuted"]
    assert not written()["releases"]["refuted"]
    assert 0 < written()["run"]["lower_bound"] < written()["run"]["accounted"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--trials 0 --canaries 0", "drop one of the two"),
        ("--confidence 1", "strictly between 0 and 1"),
        ("--confidence nan", "strictly between 0 and 1"),
        ("--trials -5", "greater than or equal to 0"),
        ("--trials 7", "at least 20"),
        ("--trials 30 --steps-per-trial 2", "at least 40"),
        ("--steps-per-trial 0", "greater than or equal to 1"),
        ("--canaries 3", "at least 10"),
        (".", "Name a folder that dpshard train made"),
    ],
)
def test_what_proves_nothing_is_refused_in_one_line(dpshard, options, said):
    message = dpshard("audit", *options.split(), exit_code=2).stderr
    assert said in message
    assert message.count("\n") == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("known_secret")
def test_noise_that_is_used_again_is_found_by_several_steps(dpshard, tmp_path, written, monkeypatch):
    faults.reuse_noise(monkeypatch, steps=4)
    flags = ["--trials", 200, "--canaries", 0, *SETTINGS, "--json", tmp_path / "audit.json"]
    output = dpshard("audit", *flags, "--steps-per-trial", 4, exit_code=3).stdout
    assert "160 trials of 4 steps (Poisson samples, 2 of 4) count" in " ".join(output.replace("│", " ").split())
    assert written()["noise"]["refuted"]
    assert not written()["sampling"]["refuted"]
    assert (written()["sampling"]["steps"], written()["sampling"]["batch_size"]) == (4, 1)


@pytest.mark.usefixtures("known_secret")
@pytest.mark.exhaustive
def test_correlated_runs_are_audited(dpshard, tmp_path, written, monkeypatch):
    """Trials are shorter than the run, and have fewer bands."""
    correlated = "--steps 6 --sampling fixed-order --correlation banded-inverse --bands 6"
    flags = f"{correlated} --steps-per-trial 4 --trials 40".split()
    process = dpshard("audit", *SETTINGS, *flags, "--json", tmp_path / "audit.json")
    assert "scored for Poisson samples" in process.stderr
    assert not written()["releases"]["refuted"]
    assert (written()["runs"]["steps"], written()["runs"]["sampling"]) == (4, "fixed-order")
    assert 0 < written()["runs"]["mu_lower_bound"] < written()["runs"]["mu_accounted"] == 2
    faults.drop_a_weight(monkeypatch)
    assert "REFUTED" in dpshard("audit", *SETTINGS, *flags, exit_code=3).stdout
    assert "trials=0" in dpshard("audit", *SETTINGS, *flags, "--trials", 0, exit_code=2).stderr


@pytest.mark.usefixtures("known_secret")
@pytest.mark.parametrize("more", quick(["--steps-per-trial", 2], rest=[[]]))
def test_a_parameter_without_noise_is_found_by_default(dpshard, tmp_path, written, monkeypatch, more):
    faults.silence(monkeypatch, "bias")
    flags = ["--trials", 60, "--canaries", 0, *SETTINGS, "--json", tmp_path / "audit.json", *more]
    assert "not have the accounted" in " ".join(dpshard("audit", *flags, exit_code=3).stdout.replace("│", " ").split())
    assert written()["releases"]["fault"].startswith("layers") or "bias" in written()["releases"]["fault"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("known_secret")
def test_a_shuffled_loader_is_found_by_several_steps(monkeypatch):
    faults.shuffle(monkeypatch)
    samples = tasks.load(settings := resolve({"device": "cpu"}))
    settings = fit(settings, samples)
    game = auditing.games(3, settings)["sampling"]
    assert auditing.audit_game(game, settings, samples, Ranks(), 250, 0.95)["refuted"]


def test_a_head_of_zeros_does_not_hide_the_layers_below():
    model = auditing._awake(models.MLP(4, 3))
    model(torch.tensor([[1.0, 2.0, -1.0, 0.5]])).sin().sum().backward()
    assert all(p.any() and p.grad.any() for p in model.parameters())
