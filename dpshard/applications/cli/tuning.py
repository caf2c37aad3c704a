"""A private search: a secret number of trials of random settings; only the best is published.

[Note: What a search publishes]
Papernot and Steinke 2022, arXiv:2110.03620, bound the best trial's epsilon, if the number of trials has one of their
distributions (accounting/search.py). So that number, the settings of the others and their scores stay secret.
Candidates may differ in cost: the bound is that of the worst one.

[Note: Private validation] One person is in the training or in the validation. The validation costs one noisy count of
right answers: Gaussian, of sensitivity 1. Both are candidates of the bound.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dpshard.accounting import (
    RunsDistribution,
    SampledMechanism,
    Search,
    calibrate,
    compute_epsilon,
    relation_of,
    rounded_up,
)
from dpshard.accounting.composition import logarithmic_stop
from dpshard.accounting.releases import Counts, Release, in_figures
from dpshard.applications.cli import provenance
from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.fitting import fit, mechanism
from dpshard.applications.cli.formats import BALANCED
from dpshard.applications.cli.run_folder import LOCK, RunFolder, intact, write_atomically, write_json
from dpshard.applications.cli.settings import TrainSettings, resolve
from dpshard.applications.cli.tasks import load
from dpshard.checkpoint.disk import open_private
from dpshard.config import BatchSchedule
from dpshard.errors import AccountingError, ConfigurationError, RunFolderError

SCORED = (Kind.IMAGE, Kind.FEATURES, Kind.TEXT)
"""Kinds whose score is a count of right answers."""
FIXED = (
    "target_epsilon target_delta noise_multiplier noise max_batch_size sampling correlation bands "
    "correlation_momentum buffers data task columns drop statistics_share statistics_noise feature_scale "
    "group_column rows_per_unit text_column label_column objective image_size max_length test_fraction "
    "validation_fraction shard nproc"
).split()
"""Settings that all trials share."""
UNUSUAL = ("noise_multiplier", "noise", "max_batch_size", "sampling", "shard")
"""Settings that no trial changes."""
LARGER = 1.005
"""Factor of all noise, until all candidates are within the budget."""


@dataclass(frozen=True)
class Plan:
    """A public plan of a search."""

    candidates: tuple[dict[str, Any], ...]
    """Settings of each candidate, with its noise_multiplier."""
    runs: tuple[Counts, ...]
    """Of each candidate, and of a private score."""
    mean_runs: float
    distribution: RunsDistribution
    score_noise: float | None
    """Of a private score."""
    target_delta: float

    @property
    def search(self) -> Search:
        """The search, with the releases of all candidates except the first."""
        return Search(self.mean_runs, self.distribution, tuple(dict.fromkeys(self.runs[1:])))

    @property
    def epsilon(self) -> float:
        """Epsilon of the outcome."""
        return compute_epsilon(self.runs[0], self.target_delta, "rdp", self.search)


def plan(
    base: Mapping[str, Any],
    choices: Mapping[str, Sequence[Any]],
    *,
    mean_runs: float,
    distribution: RunsDistribution,
    private_validation: bool,
) -> Plan:
    """Return the search over all combinations of `choices`, with noise for the budget."""
    search = Search(mean_runs, distribution)
    if fixed := [name for name in choices if name in FIXED]:
        raise ConfigurationError(f"--search {fixed[0]}: all trials share this setting.")
    combined = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    settings = [resolve(base, own) for own in combined]
    if len({own.class_weights == BALANCED for own in settings}) > 1:
        raise ConfigurationError(
            "--search class-weights: 'balanced' costs a release that public weights do not. Give it to all trials by "
            "--class-weights balanced, or search public weights."
        )
    first, usual = settings[0], TrainSettings()
    unusual = [name for name in UNUSUAL if getattr(first, name) != getattr(usual, name)]
    if first.target_epsilon is None or unusual:
        raise ConfigurationError(
            "A search needs --target-epsilon, Poisson sampling, Gaussian noise without a cap, and one process per "
            "trial: leave --noise-multiplier, --noise, --max-batch-size, --sampling and --shard out."
        )
    budget: Any = {"target_epsilon": first.target_epsilon, "target_delta": first.target_delta}
    budget |= {"accountant": "rdp", "search": search}
    data, first = _loaded(first, budget)
    if len(data.validation) == 0:
        raise ConfigurationError("A search chooses by validation samples: raise --validation-fraction above 0.")
    drawn = {"statistics_share": first.statistics_share, "statistics_noise": first.statistics_noise}
    found = [fit(replace(own, **drawn), data) for own in settings]
    parts = [calibrate(mechanism(own, data), **budget) for own in found]
    if private_validation:
        if data.kind not in SCORED or first.group_column is not None:
            raise ConfigurationError(
                "--private-validation is for scores that count right answers, one for each person: classes, without "
                "--group-column. Leave it out if the validation samples are public."
            )
        parts.append(_once(len(data.validation), budget))
    while True:
        pairs = [(asdict(own), {"noise_multiplier": m.noise_multiplier}) for own, m in zip(found, parts, strict=False)]
        candidates = tuple(own | noise | {"target_epsilon": None} for own, noise in pairs)
        runs = tuple(part.releases() for part in parts)
        score = parts[-1].noise_multiplier if private_validation else None
        done = Plan(candidates, runs, mean_runs, distribution, score, budget["target_delta"])
        if done.epsilon <= budget["target_epsilon"]:
            return done
        # Each candidate fits the budget alone, but at another Renyi order.
        parts = [replace(m, noise_multiplier=LARGER * m.noise_multiplier) for m in parts]


def _loaded(settings: TrainSettings, budget: Mapping[str, Any]) -> tuple[Data, TrainSettings]:
    # Bounds that are drawn here are thrown away; only their cost is read.
    data = load(replace(settings, statistics_noise=settings.statistics_noise or 1.0))
    if data.fitted is None or not data.fitted.earlier:
        return data, settings
    samples, noise = len(data.train), settings.statistics_noise
    if noise is None:
        share = (settings.statistics_share or 0) * budget["target_epsilon"]
        noise = _once(samples, {**budget, "target_epsilon": share}).noise_multiplier
        settings = replace(settings, statistics_share=None, statistics_noise=noise)
    earlier = ((Release(noise, 1.0, samples), 1),)
    return replace(data, fitted=replace(data.fitted, earlier=earlier)), settings


def _once(samples: int, budget: Mapping[str, Any]) -> SampledMechanism:
    return calibrate(SampledMechanism(schedule=BatchSchedule((samples,)), sample_size=samples), **budget)


def draw_runs(search: Search, uniform: Callable[[], float]) -> int:
    """Return a number of runs; `uniform` draws from [0, 1)."""
    mean, u = float(search.mean_runs), uniform()
    if search.distribution == "geometric":
        count, log_share, log_ratio = 1, -math.log(mean), lambda k: math.log1p(-1 / mean)
    elif search.distribution == "logarithmic":
        stop = logarithmic_stop(mean)
        count, log_share = 1, math.log(-(1 - stop) / math.log(stop))
        log_ratio = lambda k: math.log((1 - stop) * k / (k + 1))  # noqa: E731
    else:
        count, log_share, log_ratio = 0, -mean, lambda k: math.log(mean / (k + 1))
    # By logarithms, because the first share of a Poisson number of mean 746 is below the smallest double.
    while u >= (share := math.exp(log_share)) and not (share == 0 and count > mean):
        u, log_share, count = u - share, log_share + log_ratio(count), count + 1
    return count


class SearchFolder:
    """Files of a search; epsilon covers only the report, the weights and the columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "plan.json"  # public
        self.secret = path / "secret.json"  # the draws: NOT private
        self.inputs = path / "inputs.json"  # fingerprints of the data: NOT private
        self.trials = path / "trials"  # NOT private
        self.report = path / "report.json"

    @classmethod
    def create(cls, path: Path, plan: Plan) -> SearchFolder:
        """Create the folder of a search, with the draws of its trials."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(f"{path} exists: resume that search by --resume {path}, or choose another --out.")
        folder, source = cls(path), secrets.SystemRandom()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.trials.mkdir(mode=0o700)
        write_json(folder.inputs, _fingerprints(plan))
        runs = draw_runs(plan.search, source.random)
        write_json(folder.secret, [source.randrange(len(plan.candidates)) for _ in range(runs)])
        write_json(folder.plan, asdict(plan))  # last: it marks a search that can resume
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[SearchFolder, Plan]:
        """Return the search at `path`."""
        folder = cls(path)
        if not folder.plan.is_file():
            raise RunFolderError(f"{path} is not the folder of a search: it has no {folder.plan.name}.")
        with intact(folder.plan, "restore it from a copy, or start a new search"):
            facts = json.loads(folder.plan.read_text("utf-8"))
            runs = (tuple((Release(**release), count) for release, count in run) for run in facts["runs"])
            return folder, Plan(**facts | {"runs": tuple(runs)})

    def forget(self) -> None:
        """Remove what epsilon does not cover, after the report."""
        shutil.rmtree(self.trials, ignore_errors=True)
        for path in (self.secret, self.inputs, self.path / LOCK):
            path.unlink(missing_ok=True)

    def locked(self) -> AbstractContextManager[None]:
        """Keep others from this search, until a trial that outlives it has ended, too."""
        return RunFolder(self.path).locked(by_children=True)

    def trial(self, number: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self.trials / f"{number:04}")

    def require_inputs(self, plan: Plan) -> None:
        """Raise RunFolderError unless the data, and facts of their columns, are as before."""
        with intact(self.inputs, "restore it from a copy, or start a new search"):
            before = json.loads(self.inputs.read_text("utf-8"))
            changed = [name for name, found in _fingerprints(plan).items() if before[name] != found]
        if changed:
            raise RunFolderError(
                f"{plan.candidates[0][changed[0]]} has changed since the search began: all trials need the same data. "
                f"Restore the file and resume the search, or start a new one and add the epsilon of this one."
            )

    def drawn(self) -> list[int]:
        """Return the candidate of each trial."""
        with intact(self.secret, "restore it from a copy: another draw would be another search"):
            return [int(index) for index in json.loads(self.secret.read_text("utf-8"))]


def _fingerprints(plan: Plan) -> dict[str, str | None]:
    return {name: provenance.path_digest(plan.candidates[0][name]) for name in ("data", "columns")}


def run_trials(folder: SearchFolder, plan: Plan, jobs: int) -> None:
    """Run what is left of the trials, `jobs` at once."""
    drawn = folder.drawn()
    run = partial(_run_trial, folder, plan)
    with ThreadPoolExecutor(jobs) as pool:
        codes = list((map if jobs == 1 else pool.map)(run, range(len(drawn)), drawn))
    if any(codes):
        raise RunFolderError(
            f"A trial stopped (exit codes {sorted(set(codes))}): see the .log files in {folder.trials}. Resume the "
            f"search with: dpshard tune --resume {folder.path}"
        )


def _run_trial(folder: SearchFolder, plan: Plan, number: int, candidate: int) -> int:
    run = folder.trial(number)
    path = run.path
    if run.report.exists():
        return 0
    folder.require_inputs(plan)
    if run.config.is_file() and any(run.checkpoints.glob("step-*")):
        arguments = ["--resume", str(path)]
    else:
        shutil.rmtree(path, ignore_errors=True)  # without a checkpoint nothing was released
        config = path.with_suffix(".yaml")
        write_atomically(config, yaml.safe_dump(plan.candidates[candidate]).encode())
        arguments = ["--config", str(config), "--out", str(path)]
    return launch_trial(["train", *arguments], path.with_suffix(".log"))


def launch_trial(arguments: list[str], log: Path) -> int:
    """Run the command line in another process; return its exit code."""
    with open_private(log, "a") as file:
        # With the search's lock: two processes would train the trial of one folder.
        command = [sys.executable, "-m", "dpshard", *arguments]
        return subprocess.call(command, stdout=file, stderr=file, close_fds=False)


def conclude(folder: SearchFolder, plan: Plan) -> dict[str, Any]:
    """Choose the best trial, and remove all."""
    drawn = folder.drawn()
    folder.require_inputs(plan)
    reports = [_require_report(folder, plan, number) for number in range(len(drawn))]
    best = max(range(len(drawn)), key=partial(_score_of, folder, plan), default=None)
    names = [name for name in plan.candidates[0] if len({str(c[name]) for c in plan.candidates}) > 1]
    result: dict[str, Any] = {"statement": statement(plan), "epsilon": plan.epsilon, "delta": plan.target_delta}
    result |= {"candidates": [{name: candidate[name] for name in names} for candidate in plan.candidates]}
    result |= {"mean_runs": plan.mean_runs, "distribution": plan.distribution, "chosen": None}
    result |= {"validation": "public" if plan.score_noise is None else "private"}
    if best is not None:
        run = folder.trial(best)
        result["chosen"] = {name: plan.candidates[drawn[best]][name] for name in names}
        result["test"] = reports[best]["test"]
        for path in (run.model, run.columns, run.config):
            if path.exists():
                write_atomically(folder.path / path.name, path.read_bytes())
    write_json(folder.report, result)
    folder.forget()
    return result


def statement(plan: Plan) -> str:
    """Return the guarantee of the outcome in one sentence."""
    run, group = plan.runs[0], plan.candidates[0]["group_column"]
    samples, relation = run[-1][0].sample_size, relation_of(release for release, _ in run)
    unit = "one sample" if group is None else f"one {group}, with all rows,"
    scored = "" if plan.score_noise is None else ", of noisy scores on validation samples, which it covers, too"
    return (
        f"epsilon = {rounded_up(plan.epsilon)} at delta = {in_figures(plan.target_delta)} for {unit} of N = {samples}, "
        f"{relation} neighbours (zero-out at fixed N), for the best of a secret number of runs "
        f"({plan.distribution}, mean {plan.mean_runs:g}) among {len(plan.candidates)} candidates{scored} "
        f"(accountant: rdp, Papernot and Steinke 2022)"
    )


def _require_report(folder: SearchFolder, plan: Plan, number: int) -> dict[str, Any]:
    path = folder.trial(number).report.with_suffix(".json")
    with intact(path, "resume the search"):
        report = json.loads(path.read_text("utf-8"))
        privacy = report["privacy"]
        spent, noise, earlier = privacy["epsilon"], privacy["noise_multiplier"], len(privacy["earlier"])
        alike = (run for run in plan.runs if run[-1][0].noise_multiplier == noise)
        counts = next(run for run in alike if sum(count for _, count in run[earlier:]) == privacy["steps"])
    if spent > compute_epsilon(counts, plan.target_delta, privacy["accountant"]):
        raise AccountingError(
            "A trial repeated steps with other sums, so it cost more than the search accounts for: the search chooses "
            "nothing. Start a new search, and add its epsilon to that of this one."
        )
    return report


def _score_of(folder: SearchFolder, plan: Plan, number: int) -> float:
    run = folder.trial(number)
    path = run.path.with_suffix(".score.json")
    if path.is_file():
        return float(json.loads(path.read_text("utf-8")))
    row = run.read_metrics()[-1]
    accuracy = None if "validation_perplexity" in row else row.get("validation_accuracy")
    score = -row.get("validation_loss", math.nan) if accuracy is None else accuracy
    if plan.score_noise is not None:
        samples = json.loads(run.report.with_suffix(".json").read_text("utf-8"))["samples"]["validation"]
        right = round(score * samples)
        score = (right + plan.score_noise * secrets.SystemRandom().gauss(0, 1)) / samples
    score = score if math.isfinite(score) else -math.inf
    write_json(path, score)
    return score
