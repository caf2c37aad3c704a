"""`dpshard account`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast, get_args

import typer

from dpshard.accounting import MechanismOfUnits, Release, SampledMechanism, Search
from dpshard.accounting.releases import Counts
from dpshard.applications.cli import console, correlated
from dpshard.applications.cli.account_figures import ACCOUNTANTS, Answer, Plan, draw, show, work_out
from dpshard.applications.cli.formats import parse_phases, to_json
from dpshard.applications.cli.options import described
from dpshard.config import AccountantName, BatchSchedule, NoiseName, require_choice
from dpshard.errors import ConfigurationError


@described(
    "account",
    noise_multiplier={"names": ["--noise-multiplier", "--sigma"]},
    target_epsilon={"names": ["--target-epsilon", "--epsilon"]},
    target_delta={"names": ["--target-delta", "--delta"]},
    max_rows_per_unit={"metavar": "G"},
    earlier={"metavar": "SIGMA"},
    search_also={"metavar": "BATCHxSTEPS,...@SIGMA"},
    plot={"metavar": "FILE.png"},
    as_json={"names": ["--json"]},
)
def command(
    sample_size: int,
    batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    phases: str | None = None,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float = 1e-5,
    max_batch_size: int | None = None,
    max_rows_per_unit: int | None = None,
    noise: str = "gaussian",
    elements: int | None = None,
    earlier: list[float] | None = None,
    sampling: str = "poisson",
    correlation: str | None = None,
    bands: str | None = None,
    correlation_momentum: float | None = None,
    accountant: list[str] | None = None,
    search_runs: float | None = None,
    search_distribution: str | None = None,
    search_also: list[str] | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compute the epsilon of a DP-SGD run, the noise that it needs, or the steps that a budget allows.

    Give two of length, noise and budget.

    For example: dpshard account --sample-size 60000 --batch-size 256 --epochs 60 --sigma 1.1
    """
    length = next((x for x in (phases, epochs, steps) if x is not None), None)
    schedule = _schedule(sample_size, batch_size, epochs, steps if length is not None else 1, phases, sampling)
    run = _run(
        max_rows_per_unit,
        schedule=schedule,
        sample_size=sample_size,
        noise_multiplier=math.nan if noise_multiplier is None else noise_multiplier,
        max_batch_size=max_batch_size,
        discretized_elements=_grid_elements(noise, elements),
        earlier=_earlier(earlier or [], sample_size, max_rows_per_unit or 1, of_known_length=length is not None),
    )
    budget: Any = {"target_epsilon": target_epsilon, "target_delta": target_delta}
    told = sampling, correlation, bands, correlation_momentum
    unknown = _unknown(steps=length, epsilon=target_epsilon, noise_multiplier=noise_multiplier)
    run = correlated.parse(run, *told, of_known_length=length is not None, **budget)
    search = _search(search_runs, search_distribution, search_also or [], run)
    plan = Plan(unknown=unknown, mechanism=run, **budget, search=search)
    with console.err.status("computing ..."):
        answers = _answers(plan, accountant)
        if plot is not None:
            draw(plan, answers, plot)
    if as_json:
        typer.echo(to_json({"asked": plan.unknown, "plan": plan.known(), "answers": list(map(asdict, answers))}, 2))
    else:
        show(plan, answers)


def _answers(plan: Plan, accountants: Sequence[str] | None) -> list[Answer]:
    # The table says so.
    warnings.filterwarnings("ignore", message="accountant='gdp'")
    return [work_out(plan, cast(AccountantName, name)) for name in accountants or _able(plan)]


def _earlier(sigmas: Sequence[float], sample_size: int, rows_of_unit: int, *, of_known_length: bool) -> Counts:
    if sigmas and not of_known_length:
        raise ConfigurationError("--earlier needs a run of known length: give --steps, --epochs or --phases.")
    # All samples of a unit move a release about all samples.
    return tuple((Release(sigma, 1.0, sample_size, max_rows_per_unit=rows_of_unit), 1) for sigma in sigmas)


def _run(max_rows_per_unit: int | None, **facts: Any) -> SampledMechanism:
    if max_rows_per_unit is None:
        return SampledMechanism(**facts)
    return MechanismOfUnits(**facts, max_rows_per_unit=max_rows_per_unit)


def _search(mean_runs: float | None, distribution: Any, also: Sequence[str], run: SampledMechanism) -> Search | None:
    if mean_runs is None:
        if distribution is not None or also:
            name = "--search-also" if also else "--search-distribution"
            raise ConfigurationError(f"{name} is for a search. Give its expected number of runs by --search-runs.")
        return None
    others = tuple(_candidate(text, run) for text in also)
    return Search(mean_runs, "geometric" if distribution is None else distribution, others)


def _unknown(**given: object) -> Any:
    unknown = [name for name, value in given.items() if value is None]
    if len(unknown) != 1:
        raise ConfigurationError(
            "Give two of three, and dpshard computes the third: the length (--epochs, --steps or --phases), the noise "
            "(--noise-multiplier), the budget (--target-epsilon)."
        )
    return unknown[0]


def _candidate(text: str, run: SampledMechanism) -> Counts:
    phases, _, sigma = text.partition("@")
    try:
        noise_multiplier = float(sigma)
    except ValueError as error:
        raise ConfigurationError(f"--search-also {text}: write BATCHxSTEPS,...@SIGMA, such as 128x500@1.1.") from error
    schedule = BatchSchedule.parse(parse_phases(phases), sample_size=run.sample_size)
    return replace(run, schedule=schedule, noise_multiplier=noise_multiplier).releases()


def _grid_elements(noise: str, elements: int | None) -> int | None:
    require_choice("noise", noise, get_args(NoiseName))
    if (noise == "discrete-gaussian") != (elements is not None):
        raise ConfigurationError(
            "--noise discrete-gaussian and --elements N go together. Sums are rounded to a grid, at a cost in epsilon "
            "that depends on the number of trainable elements."
        )
    return elements


def _able(plan: Plan) -> Sequence[str]:
    if plan.mechanism.sampling != "poisson":
        return ["pld"] if plan.search is None else ["rdp"]
    if plan.search is not None or plan.mechanism.discretized_elements is not None:
        return ["rdp"]
    if plan.mechanism.max_batch_size is not None or isinstance(plan.mechanism, MechanismOfUnits):
        return ["pld"]
    return ACCOUNTANTS if plan.target_epsilon is None else [name for name in ACCOUNTANTS if name != "gdp"]


def _schedule(
    sample_size: int,
    batch_size: int | None,
    epochs: float | None,
    steps: int | None,
    phases: str | None,
    sampling: Any,
) -> BatchSchedule:
    if phases is not None:
        if any(x is not None for x in (batch_size, epochs, steps)):
            raise ConfigurationError("--phases sets size and length. Leave --batch-size, --epochs and --steps out.")
        return BatchSchedule.parse(parse_phases(phases), sample_size=sample_size)
    if batch_size is None:
        raise ConfigurationError("The size of a logical batch is missing. Give --batch-size, or --phases.")
    length: Any = {"epochs": epochs, "steps": steps, "sampling": sampling}
    return BatchSchedule.parse(batch_size, sample_size=sample_size, **length)
