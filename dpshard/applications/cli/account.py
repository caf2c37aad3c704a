"""`dpshard account`: questions, answers, their table and plot."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import typer
from rich.table import Table

from dpshard.accounting import (
    MechanismOfUnits,
    Release,
    SampledMechanism,
    Search,
    calibrate,
    compute_bound,
    compute_epsilon,
    rounded_up,
    steps_for_epsilon,
)
from dpshard.accounting.releases import Counts, in_figures
from dpshard.applications.cli import console, correlated, plots
from dpshard.applications.cli.formats import NEIGHBOURS, parse_phases, to_json
from dpshard.applications.cli.options import described
from dpshard.config import AccountantName, BatchSchedule, NoiseName, require_choice
from dpshard.errors import ConfigurationError

ACCOUNTANTS: tuple[AccountantName, ...] = get_args(AccountantName)
CERTAINTY = {"pld": "upper bound, tight", "rdp": "upper bound", "gdp": "approximation, may under-state ε"}
CURVE_POINTS = 16


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

    For example: dpshard account --sample-size 60000 --batch-size 256 --epochs 60 --noise-multiplier 1.1
    """
    length = next((x for x in (phases, epochs, steps) if x is not None), None)
    schedule = _schedule(sample_size, batch_size, epochs, steps if length is not None else 1, phases, sampling)
    units: Any = {} if max_rows_per_unit is None else {"max_rows_per_unit": max_rows_per_unit}
    run = (MechanismOfUnits if units else SampledMechanism)(
        **units,
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
        warnings.filterwarnings("ignore", message="accountant='gdp'")  # the table says so
        answers = [work_out(plan, cast(AccountantName, name)) for name in accountant or _able(plan)]
        if plot is not None:
            draw(plan, answers, plot)
    if as_json:
        typer.echo(to_json({"asked": plan.unknown, "plan": plan.known(), "answers": list(map(asdict, answers))}, 2))
    else:
        console.out.print(_table(plan, answers))
        for line in _notes(plan, answers):
            console.out.print(line)


def _earlier(sigmas: Sequence[float], sample_size: int, rows_of_unit: int, *, of_known_length: bool) -> Counts:
    if sigmas and not of_known_length:
        raise ConfigurationError("--earlier needs a run of known length: give --steps, --epochs or --phases.")
    # All samples of a unit move a release about all samples.
    return tuple((Release(sigma, 1.0, sample_size, max_rows_per_unit=rows_of_unit), 1) for sigma in sigmas)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run, with two of length, noise and budget."""

    unknown: Literal["steps", "epsilon", "noise_multiplier"]
    mechanism: SampledMechanism
    """The mechanism of the run; of one step if the length is unknown."""
    target_epsilon: float | None
    target_delta: float
    search: Search | None

    def known(self) -> dict[str, Any]:
        """Return the given facts."""
        facts = asdict(self.mechanism)
        del facts["schedule"]
        del facts["quantile_counts"]
        if (correlation := self.mechanism.noise_correlation) is not None:
            facts["noise_correlation"] = repr(correlation)
        phases = [(size, None if self.unknown == "steps" else n) for size, n in self.mechanism.schedule.phases()]
        facts |= {"noise_multiplier": None} if self.unknown == "noise_multiplier" else {}
        facts |= {"phases": phases, "target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
        facts["search"] = None if self.search is None else asdict(self.search)
        return facts | {"samples": 0 if self.unknown == "steps" else self.samples}

    @property
    def samples(self) -> int:
        """Expected number drawn."""
        return sum(self.mechanism.schedule.sizes)

    def releases(self, noise_multiplier: float, steps: int) -> Counts:
        """Return the releases of `steps` steps."""
        run = replace(self.mechanism, noise_multiplier=noise_multiplier)
        if self.unknown == "steps":
            return ((run.release(0), steps),) if steps else ()
        return run.releases(steps)

    def question(self, accountant: AccountantName) -> dict[str, Any]:
        """Return arguments of dpshard.accounting's functions."""
        return {"target_delta": self.target_delta, "accountant": accountant, "search": self.search}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Figures of one accountant."""

    accountant: AccountantName
    epsilon: float
    noise_multiplier: float
    steps: int
    neighbouring_relation: str
    upper_bound: bool
    error_over_dp_sgd: float | None
    """Error of prefix sums over that of DP-SGD at this epsilon, or None."""
    found_by: str
    """"rdp" if it is tighter than "pld"."""


def work_out(plan: Plan, accountant: AccountantName) -> Answer:
    """Return the unknown, and epsilon."""
    run, question = plan.mechanism, plan.question(accountant)
    budget: Any = plan.target_epsilon
    if plan.unknown == "noise_multiplier":
        run = calibrate(run, target_epsilon=budget, **question)
    steps = run.schedule.steps
    if plan.unknown == "steps":
        steps = steps_for_epsilon(run.release(0), target_epsilon=budget, **question)
    bound = compute_bound(plan.releases(run.noise_multiplier, steps), **question)
    return Answer(
        accountant=accountant,
        epsilon=bound.epsilon,
        found_by=bound.accountant,
        noise_multiplier=run.noise_multiplier,
        steps=steps,
        neighbouring_relation=run.relation,
        upper_bound=accountant != "gdp",
        error_over_dp_sgd=correlated.error_over_dp_sgd(run, bound.epsilon, **question),
    )


def _table(plan: Plan, answers: Sequence[Answer]) -> Table:
    run, phases = plan.mechanism, plan.mechanism.schedule.phases()
    size = " then ".join(f"{size:,}" for size, _ in phases)
    sampling = "Poisson" if run.sampling == "poisson" else run.sampling
    table = Table(
        title=f"N = {run.sample_size:,}, batch {size} ({sampling}), δ = {in_figures(plan.target_delta)}",
        title_justify="left",
    )
    columns = {"epsilon": "ε", "noise_multiplier": "σ", "steps": "steps"}
    table.add_column("accountant")
    for name, heading in columns.items():
        table.add_column(heading, justify="right", style="bold green" if name == plan.unknown else "")
    table.add_column("")
    for answer in answers:
        table.add_row(
            answer.accountant,
            rounded_up(answer.epsilon),
            rounded_up(answer.noise_multiplier),
            f"{answer.steps:,}",
            CERTAINTY[answer.accountant] if answer.found_by == answer.accountant else f"figure of {answer.found_by}",
        )
    return table


def _notes(plan: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    run = plan.mechanism
    if len(run.schedule.phases()) > 1:
        steps, largest = run.schedule.steps, max(run.schedule.sizes)
        yield (
            f"Expected number of drawn samples: {plan.samples:,} ({plan.samples / run.sample_size:.3g} epochs), "
            f"{1 - plan.samples / (largest * steps):.1%} fewer than in {steps:,} steps of {largest:,}."
        )
    if run.earlier:
        sigmas = ", ".join(f"{release.noise_multiplier:g}" for release, _ in run.earlier)
        yield f"ε covers releases about all samples before the run, too: σ = {sigmas}."
    if plan.search is not None:
        yield (
            f"ε is that of the best of K such runs, K secret and {plan.search.distribution} with mean "
            f"{plan.search.mean_runs:g}. Choose it by a public score, or by a private one that is charged."
        )
        yield (
            f"It covers runs of {1 + len(plan.search.others)} settings of noise, batch and steps, and costs as much as "
            f"the worst. Name further settings by --search-also."
        )
    for answer in answers:
        if answer.error_over_dp_sgd is not None:
            yield correlated.in_words(run, answer.error_over_dp_sgd)
    name = answers[0].neighbouring_relation
    yield f"Neighbours: {name}: {NEIGHBOURS[name]}."
    if isinstance(run, MechanismOfUnits):
        yield (
            f"Here the blank replaces all samples of one unit, at most {run.max_rows_per_unit:,}. Cut units down to "
            f"this number before the training."
        )
    for answer in answers:
        if answer.steps == 0:
            yield f"{answer.accountant}: not even one step fits the budget."
        elif answer.epsilon == 0:
            yield f"{answer.accountant}: with this much noise δ alone covers the run; less noise gives no ε so small."


def draw(plan: Plan, answers: Sequence[Answer], path: Path) -> None:
    """Draw epsilon over steps or sigma."""
    over_sigma = plan.unknown == "noise_multiplier"
    with plots.styled():
        figure = plots.new_figure(figsize=(6.4, 4))
        ax = figure.subplots()
        for answer in answers:
            colour = plots.COLOURS[ACCOUNTANTS.index(answer.accountant)]
            points = _more_or_less_noise(answer) if over_sigma else _shorter_runs(plan, answer)
            question = plan.question(answer.accountant)
            ys = [compute_epsilon(plan.releases(sigma, steps), **question) for sigma, steps in points]
            xs = [sigma if over_sigma else steps for sigma, steps in points]
            ax.plot(xs, ys, "-" if answer.upper_bound else ":", color=colour, label=answer.accountant)
            ax.plot(answer.noise_multiplier if over_sigma else answer.steps, answer.epsilon, "o", color=colour)
        if plan.target_epsilon is not None:
            ax.axhline(plan.target_epsilon, color="0.4", linewidth=1, linestyle="--", label="budget")
        length = f"of {plan.mechanism.schedule.steps:,} steps " if over_sigma else ""
        ax.set_title(f"ε {length}at δ = {in_figures(plan.target_delta)}")
        ax.set_xlabel("noise multiplier σ" if over_sigma else "steps")
        ax.set_ylim(bottom=0)
        ax.legend()
        plots.save(figure, path)
    console.err.print(f"Drawn to {path}")


def _more_or_less_noise(answer: Answer) -> list[tuple[float, int]]:
    return [(answer.noise_multiplier * 2 ** (k / 16), answer.steps) for k in range(-5, 9)]


def _shorter_runs(plan: Plan, answer: Answer) -> list[tuple[float, int]]:
    if not answer.steps:
        return []
    lengths = {math.ceil(answer.steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    # The curve has a kink at the end of a phase.
    ends = itertools.accumulate(count for _, count in plan.mechanism.schedule.phases())
    return [(answer.noise_multiplier, steps) for steps in sorted(lengths | {1} | set(ends))]
