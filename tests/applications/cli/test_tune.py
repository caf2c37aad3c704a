"""`dpshard tune`: the epsilon of the whole search, the draw of its trials, the best of them, and stops.

Failure modes: 25 test_the_budget_is_that_of_the_whole_search; 24 test_a_search_that_was_stopped_resumes.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from dpshard.accounting import SampledMechanism, Search, compute_epsilon
from dpshard.accounting.composition import logarithmic_stop
from dpshard.accounting.releases import Release
from dpshard.applications.cli import app, tuning
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError, ConfigurationError, RunFolderError

pytestmark = pytest.mark.usefixtures("coarse_losses")

BASE = {"task": "digits", "steps": 4, "batch_size": 128, "evaluations": 1, "target_epsilon": 3.0, "target_delta": 1e-4}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in BASE.items()]
SEARCH = ["--search", "learning-rate=1e-6,0.5", "--mean-runs", "3"]
QUIET = {"mean_runs": 3.0, "distribution": "geometric", "private_validation": False}


@pytest.fixture(autouse=True)
def within(monkeypatch):
    """Run trials in this process; tests that start others undo it."""

    def launch(arguments, log):
        result = CliRunner().invoke(app, arguments)
        log.write_text(result.output)
        return result.exit_code

    monkeypatch.setattr(tuning, "launch_trial", launch)


def drawn(monkeypatch, *candidates):
    monkeypatch.setattr(tuning, "draw_runs", lambda search, uniform: len(candidates))
    left = list(candidates)
    monkeypatch.setattr(tuning.secrets.SystemRandom, "randrange", lambda self, n: left.pop(0))


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic", "poisson"])
def test_the_number_of_trials_has_its_distribution(distribution):
    random = np.random.default_rng(0)
    search, draws = Search(4.0, distribution), 20_000
    found = Counter(tuning.draw_runs(search, random.random) for _ in range(draws))
    p = logarithmic_stop(4.0)
    law = {
        "geometric": stats.geom(1 / 4),
        "poisson": stats.poisson(4),
        "logarithmic": stats.logser(1 - p),
    }[distribution]
    assert law.mean() == pytest.approx(4, rel=1e-6)
    least = min(found)
    bins = range(least, 12)
    seen = [found[k] for k in bins] + [sum(n for k, n in found.items() if k > 11)]
    expected = [draws * law.pmf(k) for k in bins] + [draws * law.sf(11)]
    assert sum(seen) == draws
    assert stats.chisquare(seen, np.array(expected) * draws / sum(expected)).pvalue > 1e-6


def test_a_poisson_number_of_a_large_mean_is_drawn():
    """Its first share, exp(-1000), is below the smallest double. Five standard deviations: false alarms 6e-7."""
    random = np.random.default_rng(0)
    found = [tuning.draw_runs(Search(1000.0, "poisson"), random.random) for _ in range(400)]
    assert abs(np.mean(found) - 1000) < 5 * math.sqrt(1000 / 400)
    assert 700 < np.var(found) < 1400


def test_the_budget_is_that_of_the_whole_search():
    plan = tuning.plan(BASE, {"learning_rate": [0.1, 0.5], "batch_size": [128, 256]}, **QUIET)
    assert len(plan.candidates) == 4
    runs = []
    for candidate in plan.candidates:
        schedule = BatchSchedule((candidate["batch_size"],) * 4)
        sigma = candidate["noise_multiplier"]
        runs.append(SampledMechanism(schedule=schedule, sample_size=1258, noise_multiplier=sigma).releases())
    search = Search(3.0, "geometric", tuple(runs[1:]))
    assert plan.epsilon == pytest.approx(compute_epsilon(runs[0], 1e-4, "rdp", search), rel=1e-9)
    assert 2.9 < plan.epsilon <= 3.0
    alone = compute_epsilon(runs[0], 1e-4, "rdp")
    assert alone < plan.epsilon  # a search costs more than a run
    assert {c["target_epsilon"] for c in plan.candidates} == {None}


@pytest.mark.parametrize("weights", [["yes=5", "balanced"], ["balanced", "yes=5"]])
def test_candidates_with_private_counts_and_without_are_refused(weights):
    """The bound would miss the counts, or the account of a trial would not fit, at the end of the search."""
    with pytest.raises(ConfigurationError, match="balanced"):
        tuning.plan({"data": "x.csv", "target_epsilon": 3.0}, {"class_weights": weights}, **QUIET)


def test_a_private_score_is_a_candidate_of_the_bound():
    public = tuning.plan(BASE, {"learning_rate": [0.1, 0.5]}, **QUIET)
    private = tuning.plan(BASE, {"learning_rate": [0.1, 0.5]}, **(QUIET | {"private_validation": True}))
    assert public.score_noise is None
    release = Release(private.score_noise, 1.0, 180)
    assert ((release, 1),) in private.search.others
    assert private.epsilon <= 3.0
    # A person of the validation samples alone is in nothing but the count.
    assert compute_epsilon(((release, 1),), 1e-4, "rdp", Search(3.0)) <= 3.0
    assert "noisy scores" in tuning.statement(private)


@pytest.mark.exhaustive
def test_the_best_trial_comes_out_and_nothing_else(tmp_path, dpshard, monkeypatch):
    drawn(monkeypatch, 0, 1, 0)
    out = tmp_path / "search"
    options = [*OPTIONS, "--target-epsilon", 50, "--batch-size", 500, "--search", "model=cnn,mlp", "--mean-runs", 2]
    shown = dpshard("tune", *options, "--out", out).stdout
    report = json.loads((out / "report.json").read_text())
    assert report["chosen"]["model"] == "mlp"  # four steps are too few for the other
    assert report["test"]["after"]["accuracy"] > report["test"]["before"]["accuracy"]
    assert report["epsilon"] <= 50
    assert report["statement"] in " ".join(shown.split())
    assert {path.name for path in out.iterdir()} == {"plan.json", "report.json", "model.pt", "config.yaml"}
    assert "trials" not in json.dumps(report)
    assert "finished already" in dpshard("tune", "--resume", out).stdout


def test_a_search_that_was_stopped_resumes(tmp_path, dpshard, monkeypatch):
    drawn(monkeypatch, 1, 0, 1)
    out = tmp_path / "search"
    with monkeypatch.context() as patch:  # the second trial is stopped after its last step
        write, calls = tuning.RunFolder.create, []

        def once(path, settings):
            calls.append(path)
            if len(calls) == 2:
                patch.setattr("dpshard.applications.cli.final_report.write", stop)
            return write(path, settings)

        def stop(*_):
            raise KeyboardInterrupt

        patch.setattr("dpshard.applications.cli.run_folder.RunFolder.create", once)
        assert "--resume" in dpshard("tune", *OPTIONS, *SEARCH, "--out", out, exit_code=2).stderr
    secret = (out / "secret.json").read_text()
    first = (out / "trials" / "0000" / "model.pt").stat().st_mtime_ns
    with monkeypatch.context() as patch:  # neither the draw nor the first trial is made again
        patch.setattr(tuning.SearchFolder, "forget", lambda self: None)
        dpshard("tune", "--resume", out)
    assert (out / "secret.json").read_text() == secret == json.dumps([1, 0, 1], indent=2)
    assert (out / "trials" / "0000" / "model.pt").stat().st_mtime_ns == first
    assert json.loads((out / "report.json").read_text())["chosen"]["learning_rate"] == 0.5
    dpshard("tune", "--resume", out)
    assert not (out / "trials").exists()


def test_one_process_searches_and_no_trial_of_a_killed_search_still_runs(tmp_path, dpshard, monkeypatch):
    """Two would train one trial twice, and draw private scores twice."""
    monkeypatch.undo()
    plan = tuning.plan(BASE, {"learning_rate": [0.1, 0.5]}, **QUIET)
    folder = tuning.SearchFolder.create(tmp_path / "search", plan)
    trial = tmp_path / "trial"
    lasts = f"for i in $(seq 400); do [ -e {tmp_path}/begun ] && sleep 0.05; done; exit 0"
    trial.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\n{lasts}\n")
    trial.chmod(0o700)
    monkeypatch.setattr(tuning.sys, "executable", str(trial))
    with ThreadPoolExecutor(1) as pool:
        with folder.locked():
            done = pool.submit(tuning.launch_trial, [], tmp_path / "log")
            end = time.monotonic() + 60
            while not (tmp_path / "begun").exists() and time.monotonic() < end:
                time.sleep(0.02)
            assert "Another process" in dpshard("tune", "--resume", folder.path, exit_code=2).stderr
        assert "Another process" in dpshard("tune", "--resume", folder.path, exit_code=2).stderr  # the trial goes on
        (tmp_path / "begun").unlink()
        assert done.result(60) == 0
    with folder.locked():
        pass


@pytest.mark.parametrize("changed", ["x.csv", "columns.yaml"])
def test_data_that_change_between_trials_end_the_search(tmp_path, dpshard, monkeypatch, changed):
    drawn(monkeypatch, 0, 1)
    table, columns, out = tmp_path / "x.csv", tmp_path / "columns.yaml", tmp_path / "search"
    table.write_text("a,label\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(100)))
    columns.write_text("a: [0, 7]\n")
    trial, seen = tuning.launch_trial, []

    def launch(arguments, log):
        seen.append(log)
        code = trial(arguments, log)
        path = tmp_path / changed
        path.write_text(path.read_text() + "\n")
        return code

    monkeypatch.setattr(tuning, "launch_trial", launch)
    options = ["--data", table, "--columns", columns, "--steps", 2, "--target-delta", "1e-3", "--evaluations", 1]
    said = dpshard("tune", *options, "--search", "model=linear,mlp", "--out", out, exit_code=2).stderr
    assert f"{changed} has changed" in " ".join(said.split())
    assert len(seen) == 1
    assert not (out / "model.pt").exists()
    assert changed in dpshard("tune", "--resume", out, exit_code=2).stderr


@pytest.mark.exhaustive
def test_a_search_that_was_killed_resumes(tmp_path, dpshard, monkeypatch):
    """SIGKILL of the search and its trial at a checkpoint: draws and finished steps stay."""
    monkeypatch.undo()
    out = tmp_path / "search"
    command = ["-m", "dpshard", "tune", *OPTIONS, "--steps", 150, "--checkpoint-every", 5, *SEARCH, "--out", out]
    with open(tmp_path / "log", "w") as log:
        search = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: list(out.glob("trials/*/checkpoints/step-*5")), search)
        finally:
            os.killpg(search.pid, signal.SIGKILL)
            search.wait()
    wait_until(lambda: is_free(out))
    before = (out / "secret.json").read_text()
    started = min(out.glob("trials/0000/metrics.jsonl")).read_text().splitlines()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.SearchFolder, "forget", lambda self: None)
        patch.setattr(tuning, "launch_trial", lambda arguments, log: CliRunner().invoke(app, arguments).exit_code)
        dpshard("tune", "--resume", out)
    assert (out / "secret.json").read_text() == before
    assert (out / "trials/0000/metrics.jsonl").read_text().splitlines()[0] == started
    assert json.loads((out / "report.json").read_text())["epsilon"] <= 3.0


def is_free(out):
    try:
        with tuning.SearchFolder(out).locked():
            return True
    except RunFolderError:  # the kernel still ends the trial
        return False


def wait_until(holds, process=None, seconds=240):
    end = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_trial_that_cost_more_than_planned_ends_the_search(tmp_path, dpshard, monkeypatch):
    drawn(monkeypatch, 1)
    out = tmp_path / "search"
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "conclude", lambda folder, plan: {"statement": "", "chosen": None})
        dpshard("tune", *OPTIONS, *SEARCH, "--out", out)
    path = out / "trials" / "0000" / "report.json"
    report = json.loads(path.read_text())
    folder, plan = tuning.SearchFolder.open(out)
    report["privacy"]["epsilon"] *= 1.001
    path.write_text(json.dumps(report))
    with pytest.raises(AccountingError, match="more than the search accounts for"):
        tuning.conclude(folder, plan)
    assert not (out / "model.pt").exists()


def test_no_trial_publishes_nothing(tmp_path, dpshard, monkeypatch):
    drawn(monkeypatch)
    out = tmp_path / "search"
    assert "nothing" in dpshard("tune", *OPTIONS, *SEARCH, "--distribution", "poisson", "--out", out).stdout
    assert json.loads((out / "report.json").read_text())["chosen"] is None
    assert not (out / "model.pt").exists()


@pytest.mark.exhaustive
def test_trials_run_at_once_in_processes_of_their_own(tmp_path, dpshard, monkeypatch):
    monkeypatch.undo()
    drawn(monkeypatch, 0, 1)
    out = tmp_path / "search"
    dpshard("tune", *OPTIONS, *SEARCH, "--jobs", 2, "--private-validation", "--out", out)
    report = json.loads((out / "report.json").read_text())
    assert report["validation"] == "private"
    assert math.isfinite(report["epsilon"])


def test_a_table_with_private_bounds_is_searched_within_the_budget(tmp_path, dpshard, monkeypatch):
    drawn(monkeypatch, 1)
    random = np.random.default_rng(0)
    table = tmp_path / "x.csv"
    table.write_text("a,label\n" + "".join(f"{x:.3f},{int(x > 50)}\n" for x in random.normal(50, 9, 300)))
    options = ["--data", table, "--steps", 5, "--target-epsilon", 4, "--target-delta", "1e-3", "--evaluations", 1]
    out = tmp_path / "search"
    dpshard("tune", *options, "--search", "model=linear,mlp", "--out", out)
    report = json.loads((out / "report.json").read_text())
    assert report["chosen"] == {"model": "mlp"}
    assert report["epsilon"] <= 4
    plan = tuning.SearchFolder.open(out)[1]
    assert plan.runs[0][0] == (Release(plan.candidates[0]["statistics_noise"], 1.0, 210), 1)
    assert (out / "columns.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search", "target-epsilon=1,2"], "all trials share"),
        (["--search", "learning-rate"], "SETTING=A,B"),
        ([], "--search is missing"),
        (["--search", "learning-rate=0.1,0.2", "--noise-multiplier", "1"], "needs --target-epsilon"),
        (["--search", "learning-rate=0.1,0.2", "--sampling", "balls-in-bins"], "Poisson sampling"),
        (["--search", "sampling=poisson,balls-in-bins"], "all trials share"),
        (["--search", "learning-rate=0.1,0.2", "--validation-fraction", "0"], "validation"),
        (["--search", "learning-rate=0.1,0.2", "--mean-runs", "1"], "mean_runs"),
        (["--resume", "x", "--steps", "3"], "leave the other options out"),
        (["--resume", "x"], "not the folder of a search"),
    ],
)
def test_searches_that_cannot_be_are_refused(tmp_path, dpshard, options, message):
    given = [] if "--resume" in options else [*OPTIONS, "--out", tmp_path / "search"]
    assert message in " ".join(dpshard("tune", *given, *options, exit_code=2).stderr.split())


def test_private_scores_are_for_classes():
    with pytest.raises(ConfigurationError, match="count right answers"):
        tuning.plan(BASE | {"task": "pydoc"}, {"learning_rate": [0.1]}, **(QUIET | {"private_validation": True}))
