"""Private scores: their budget, their noise, one sample's influence, and what a resumed run finds."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dpshard.checkpoint.scores as module
from dpshard import PrivacyEngine, PrivateScores
from dpshard.accounting import Release, compute_epsilon
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError

BUDGET: Any = {"target_epsilon": 0.5, "target_delta": 1e-5}


@pytest.fixture
def make(tmp_path):
    settings: Any = {"samples": 1000, "count": 20} | BUDGET
    return lambda **given: PrivateScores(tmp_path / "scores.jsonl", **settings | given)


@pytest.mark.parametrize("count", [1, 20])
def test_all_scores_together_cost_the_budget(make, count):
    scores = make(count=count)
    each = Release(scores.noise, 1.0, 1000)
    composed = compute_epsilon(((each, count),), 1e-5)
    assert scores.epsilon() == pytest.approx(composed, rel=1e-3)
    assert 0.499 < scores.epsilon() <= 0.5
    assert scores.statement().startswith("epsilon = 0.5000 at delta = 1e-05 for one validation sample of M = 1000")


def test_the_noise_is_that_of_the_account(tmp_path):
    """A two-sided chi-square test of 2,000 scores in files of 250: false alarms 1e-6."""
    files = [PrivateScores(tmp_path / str(i), samples=1000, count=250, **BUDGET) for i in range(8)]
    noise = [1000 * scores.score(step, 700) - 700 for scores in files for step in range(250)]
    sum_of_squares = sum(x**2 for x in noise) / files[0].noise ** 2
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 2000)
    assert low < sum_of_squares < high
    assert stats.kstest(np.array(noise) / files[0].noise, "norm").pvalue > 1e-6


def test_a_right_answer_more_moves_a_score_by_one_over_m(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "new_run_secret", lambda: bytes(32))
    one, other = (PrivateScores(tmp_path / name, samples=50, count=2, **BUDGET) for name in ("a", "b"))
    assert other.score(7, 31) - one.score(7, 30) == pytest.approx(1 / 50, abs=1e-12)


def test_the_last_bits_of_a_score_do_not_tell_no_right_answer_from_one(make):
    """In full precision, 4% of the scores of 0 right answers (epsilon = 1) are no sum of 1 and a double."""
    scores = make(samples=256, count=40)
    noisy = [256 * scores.score(step, 0) for step in range(40)]
    assert all((1024 * x).is_integer() for x in noisy)
    assert len(set(noisy)) > 30


def test_more_scores_than_paid_for_are_refused(make):
    scores = make(count=2)
    first = scores.score(10, 900)
    scores.score(20, 0)
    assert scores.score(10, 5) == first  # drawn once
    with pytest.raises(BudgetExceededError, match="All 2 scores"):
        scores.score(30, 900)


def test_a_resumed_run_finds_its_scores(make, tmp_path):
    scores = make(count=3)
    found = {step: scores.score(step, right) for step, right in ((10, 100), (20, 900))}
    path = tmp_path / "scores.jsonl"
    assert path.stat().st_mode & 0o077 == 0
    with path.open("a") as file:
        file.write('{"step": 30, "sc')  # a crash while it was written
    again = make(count=3)
    assert {step: again.score(step, 500) for step in found} == found
    assert again.best == max(found, key=lambda step: found[step])
    again.score(30, 500)
    with pytest.raises(BudgetExceededError):
        make(count=3).score(40, 500)
    with pytest.raises(CheckpointError, match="other settings"):
        make(count=4)
    path.write_text("[]\n")
    with pytest.raises(CheckpointError):
        make(count=3)


def test_two_runs_of_one_file_share_scores_and_budget(make, tmp_path):
    one, other = make(count=2), make(count=2)
    first = one.score(10, 500)
    assert other.score(10, 900) == first
    other.score(20, 500)
    with pytest.raises(BudgetExceededError):
        one.score(30, 500)
    (tmp_path / "scores.jsonl").unlink()
    with pytest.raises(CheckpointError, match="lost"):
        one.score(30, 500)


def test_a_score_that_was_not_written_has_noise_of_its_own(make, monkeypatch):
    """Equal noise of two counts would show their difference."""
    scores, drawn = make(count=2), []
    monkeypatch.setattr(scores, "_append", lambda _, row: drawn.append(row["score"]))
    for right in (500, 501):
        scores._scores = {}
        scores.score(10, right)
    assert abs(drawn[1] - drawn[0] - 1 / 1000) > 1e-9


def test_only_rank_0_draws(make, monkeypatch):
    """With its noise by every rank, a score would be as many releases."""
    rank = {"is_initialized": lambda: True, "get_rank": lambda: 1}
    scores = make(count=2)
    for name, value in rank.items():
        monkeypatch.setattr(module.dist, name, value)
    with pytest.raises(ConfigurationError, match=r"Rank 1 .* only on rank 0"):
        scores.score(20, 500)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"count": 1.5}, {"target_epsilon": -1.0}, {"target_epsilon": math.nan}, {"count": True}]
)
def test_numbers_out_of_range_are_refused(make, wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        make(**wrong)


@pytest.mark.parametrize("step", [-1, 10.5, "10", True, None])
def test_a_step_is_a_whole_number(make, step):
    with pytest.raises(ConfigurationError, match="step"):
        make().score(step, 900)
    make()  # the file is intact


@pytest.mark.parametrize("right", [-1, 1001, 3.0])
def test_a_count_is_between_none_and_all(make, right):
    with pytest.raises(ConfigurationError, match="right"):
        make().score(1, right)


def test_persons_in_both_pay_both(make):
    from torch import nn

    scores = make(samples=1000)
    settings: Any = {"batch_size": 100, "sample_size": 3000, "steps": 5, "noise_multiplier": 2.0, "target_delta": 1e-5}
    engine = PrivacyEngine(nn.Linear(2, 1), **settings, earlier=scores.earlier(3000))
    assert engine.epsilon() == pytest.approx(scores.epsilon(), rel=1e-3)  # before the first step
    assert "1 releases about all samples before" in engine.statement()
    engine.detach()
