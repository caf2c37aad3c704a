"""Advice: it recovers the settings of its sources, keeps the budget and the compute, and what it prints runs."""

import dataclasses
import json
import math
import shlex
import subprocess
import sys

import pytest

from dpshard import PrivacyEngine, accounting, advise
from dpshard.accounting import SampledMechanism, compute_epsilon
from dpshard.applications.advice import advice as module
from dpshard.applications.advice.starts import STARTS
from dpshard.applications.advice.trade_offs import Target, TradeOff, smallest_within
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError

SMALL = {"sample_size": 64, "target_epsilon": 1.0}


@pytest.fixture
def quick(monkeypatch):
    """An accountant by the central limit, which costs nothing."""

    def epsilon_of(counts, delta, _method):
        mu_squared = sum(n * r.sampling_probability**2 * math.expm1(r.noise_multiplier**-2) for r, n in counts)
        return mu_squared / 2 + math.sqrt(-2 * mu_squared * math.log(delta))

    monkeypatch.setattr("dpshard.applications.advice.trade_offs.epsilon_of", epsilon_of)


@pytest.fixture(scope="module")
def tabular():
    return advise(**SMALL)


def test_the_noise_keeps_the_budget_and_wastes_little_of_it(tabular):
    for row in tabular.trade_offs:
        run = SampledMechanism(
            schedule=BatchSchedule((row.batch_size,) * tabular.steps),
            sample_size=tabular.sample_size,
            noise_multiplier=row.noise_multiplier,
        )
        epsilon = compute_epsilon(run.releases(), tabular.target_delta, "pld")
        assert 0.99 * tabular.target_epsilon < epsilon <= tabular.target_epsilon


def test_few_calls_of_the_accountant_find_each_sigma(monkeypatch):
    found = []

    def counted(counts, delta, method):
        found.extend(release.sampling_probability for release, _ in counts if release.sampling_probability < 1)
        return accounting.epsilon_of(counts, delta, method)

    monkeypatch.setattr("dpshard.applications.advice.trade_offs.epsilon_of", counted)
    rows = advise(sample_size=1400, target_epsilon=3.0).trade_offs
    assert len(rows) > 5
    assert len(found) <= 2.5 * len(rows)


def test_a_batch_of_all_samples_has_the_least_noise_per_batch(tabular):
    noises = [row.relative_noise for row in tabular.trade_offs]
    assert noises == sorted(noises)
    assert 1 <= noises[0] < 1.1
    assert [row.batch_size for row in tabular.trade_offs] == [32, 16]
    assert tabular.trade_offs[0].noise_per_batch == tabular.trade_offs[0].noise_multiplier / 32


@pytest.mark.parametrize(
    ("start", "samples", "batch_size", "steps", "epsilon", "delta"),
    [
        (("vision", False), 50_000, 4096, 875, 1.0, 1e-5),
        (("language", True), 67_349, 1000, 202, 3.0, 1 / (2 * 67_349)),
    ],
)
def test_published_settings_lie_where_the_rule_says(monkeypatch, start, samples, batch_size, steps, epsilon, delta):
    """De et al. on CIFAR-10, Li et al. on SST-2: twice or half their batch is on the other side of the rule."""
    monkeypatch.setattr("dpshard.applications.advice.trade_offs.DRAFT", "rdp")  # quick
    target = Target(samples, epsilon, delta)
    least = target.noise_multiplier(samples, 1) * steps**0.5 / samples
    half, twice = (target.noise_multiplier(size, steps) / size / least for size in (batch_size // 4, 2 * batch_size))
    assert half > STARTS[start].relative_noise > twice


def test_a_language_model_from_scratch_gets_a_batch_as_large_as_other_models():
    """Half of the samples would have nearly the same noise; a batch of 32 has 2.5 times as much."""
    advice = advise(sample_size=2087, target_epsilon=3.0, task="language", model="gpt")
    assert advice.batch_size == 256
    assert advice.learning_rate == 0.01


def test_the_smallest_batch_within_the_relative_noise_is_chosen():
    rows = tuple(
        TradeOff(batch_size=b, noise_multiplier=1.0, epochs=1.0, relative_noise=e)
        for b, e in ((64, 1.01), (32, 1.04), (16, 2))
    )
    assert smallest_within(rows, 1.05).batch_size == 32
    assert smallest_within(rows, 1.001).batch_size == 64


@pytest.mark.usefixtures("quick")
def test_compute_shortens_the_run_before_the_batch():
    whole = advise(sample_size=1000, target_epsilon=3.0)
    half = advise(
        sample_size=1000, target_epsilon=3.0, hours=1, samples_per_second=whole.batch_size * whole.steps / 7200
    )
    assert (half.batch_size, half.steps) == (whole.batch_size, whole.steps // 2)
    tiny = advise(sample_size=1000, target_epsilon=3.0, hours=1, samples_per_second=300 / 3600)
    assert (tiny.batch_size, tiny.steps) == (300 // module.FEWEST_STEPS, module.FEWEST_STEPS)
    assert "hours" in {reason.what for reason in tiny.reasons}
    assert any(row.batch_size == tiny.batch_size for row in tiny.trade_offs)


@pytest.mark.parametrize(("samples", "delta"), [(100, 1e-5), (50_000, 1e-5), (50_001, 1e-6), (10**9, 1e-10)])
def test_delta_by_default_is_far_enough_below_one_over_n(samples, delta):
    assert module._default_delta(samples) == pytest.approx(delta)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sample_size": 0}, "empty"),
        ({"target_epsilon": -1.0}, "target_epsilon"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"task": "sound"}, "task"),
        ({"model": "gpt"}, "model"),
        ({"pretrained": True}, "tabular"),
        ({"task": "vision", "pretrained": True}, "package.module:function"),
        ({"hours": 1.0}, "samples_per_second"),
        ({"hours": -1.0, "samples_per_second": 1.0}, "hours"),
        ({"hours": 1e-9, "samples_per_second": 1.0}, "hours"),
    ],
)
def test_bad_input_is_named(wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        advise(**SMALL | wrong)


@pytest.mark.usefixtures("quick")
def test_a_large_delta_is_warned_of():
    with pytest.warns(UserWarning, match="at least 1/N"):
        advise(**SMALL, target_delta=0.1)


def test_every_choice_names_its_source():
    for start in STARTS.values():
        assert {"noise", "steps", "optimizer", "learning rate", "trains"} == {r.what for r in start.reasons}
        assert all("arXiv" in reason.source or "ours" in reason.source for reason in start.reasons)


@pytest.mark.parametrize(
    ("task", "model"), [("tabular", "mlp"), ("vision", "cnn"), ("language", "text"), ("language", "gpt")]
)
def test_the_code_runs(task, model, tabular, capsys):
    start = STARTS[task, False]
    assert model in start.models
    short = dataclasses.replace(tabular, task=task, model=model, optimizer=start.optimizer, steps=2)
    exec(compile(short.code(), "advice", "exec"), {"__name__": "__main__"})
    assert "2 releases" in capsys.readouterr().out


def test_the_code_builds_the_users_own_model(tabular):
    code = dataclasses.replace(tabular, model="networks.tables:build").code()
    assert "from networks.tables import build\n" in code
    assert "model = build(tuple(x.shape[1:]), classes)" in code


def test_the_engine_takes_the_advice(tabular):
    from torch import nn

    engine = PrivacyEngine(nn.Linear(2, 1), **tabular.engine_arguments(), verify=False)
    assert engine.steps == tabular.steps
    assert engine.noise_multiplier <= tabular.noise_multiplier <= 1.01 * engine.noise_multiplier
    engine.detach()


def test_advice_does_not_wait_for_torch():
    code = "import sys, dpshard; dpshard.advise; assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_command_that_runs(dpshard, tabular, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i % 7},{i % 3},{i % 2}\n" for i in range(91))  # 64 to train on
    (tmp_path / "table.csv").write_text("a,b,label\n" + rows)
    program, *arguments = shlex.split(dataclasses.replace(tabular, steps=2).command().replace("\\\n", ""))
    assert program == "dpshard"
    dpshard(*arguments, "--out", "run")
    assert (tmp_path / "run/model.pt").exists()


def test_the_table_the_picture_and_json_show_the_advice(dpshard, tabular, tmp_path):
    picture, figures = tmp_path / "advice.png", tmp_path / "advice.json"
    arguments = ["--sample-size", 64, "--target-epsilon", 1, "--plot", picture, "--json", figures]
    said = dpshard("advise", *arguments).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(figures.read_text())["batch_size"] == tabular.batch_size
    assert float(said.split("σ = ")[1].split(",")[0]) >= tabular.noise_multiplier
    assert tabular.command() in said
    assert tabular.code() in said
    for reason in tabular.reasons:
        assert reason.source in said


def test_bad_input_costs_one_line(dpshard):
    error = dpshard("advise", "--sample-size", 0, "--target-epsilon", 3, exit_code=2).stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
