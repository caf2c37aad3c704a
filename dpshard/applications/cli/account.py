"""`dpshard account`: epsilon, noise, or number of steps of a run."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer
from rich.table import Table

from dpshard.accounting import (
    CorrelatedMechanism,
    SampledMechanism,
    Search,
    calibrate,
    compute_bound,
    compute_epsilon,
    relation_of,
    rounded_up,
    steps_for_epsilon,
)
from dpshard.accounting.releases import Counts
from dpshard.applications.cli import console, correlated, plots
from dpshard.applications.cli.formats import NEIGHBOURS, to_json
from dpshard.applications.cli.settings import parse_phases
from dpshard.config import AccountantName, BatchSchedule, NoiseName, check_choice
from dpshard.errors import ConfigurationError

ACCOUNTANTS: tuple[AccountantName, ...] = get_args(AccountantName)
CERTAINTY = {"pld": "upper bound, tight", "rdp": "upper bound", "gdp": "approximation, may under-state ε"}
CURVE_POINTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run; two of length, noise and budget are given."""

    unknown: Literal["steps", "epsilon", "noise_multiplier"]
    """The field of Answer to compute."""
    mechanism: SampledMechanism | CorrelatedMechanism
    """The run, of one step if its length is unknown."""
    target_epsilon: float | None
    target_delta: float
    search: Search | None
    """A search over many such runs, under one budget; None for a single run."""

    def known(self) -> dict[str, Any]:
        """Return the given facts for JSON, null if unknown."""
        facts = asdict(self.mechanism)
        del facts["schedule"]
        if isinstance(self.mechanism, CorrelatedMechanism):
            facts["correlation"] = repr(self.mechanism.correlation)
        else:
            del facts["quantile_counts"]
        asked_for = {"noise_multiplier": None} if self.unknown == "noise_multiplier" else {}
        phases = [(size, None if self.unknown == "steps" else n) for size, n in self.mechanism.schedule.phases()]
        budget = {
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta,
            "search": None if self.search is None else asdict(self.search),
            "samples": 0 if self.unknown == "steps" else self.samples,
        }
        return facts | asked_for | {"phases": phases} | budget

    @property
    def samples(self) -> int:
        """Expected number of drawn samples."""
        return sum(self.mechanism.schedule.sizes)

    def releases(self, noise_multiplier: float, steps: int) -> Counts:
        """Return the releases of the first `steps` steps with this noise."""
        run = replace(self.mechanism, noise_multiplier=noise_multiplier)
        if self.unknown == "steps" and isinstance(run, SampledMechanism):
            return ((run.release(0), steps),) if steps else ()
        return run.releases(steps)

    def question(self, accountant: AccountantName) -> dict[str, Any]:
        """Return the arguments shared by the functions of dpshard.accounting."""
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
    """True if the true epsilon is certainly not larger."""
    error_over_dp_sgd: float | None
    """Error of prefix sums over that of DP-SGD (Poisson) at this epsilon; None for DP-SGD."""
    found_by: str
    """Accountant of the figure: "rdp" if "pld" was asked and "rdp" is tighter."""


Phases = Annotated[
    str | None, typer.Option(help="Schedule BATCHxSTEPS,...: e.g. 128x50,512x100; instead of size and length.")
]
Sigma = Annotated[
    float | None,
    typer.Option(
        "--noise-multiplier", "--sigma", help="Noise sigma: standard deviation over the sensitivity, unitless."
    ),
]
Cap = Annotated[
    int | None, typer.Option(help="Cap of a logical batch in samples: truncated Poisson sampling (pld only).")
]
Accountants = Annotated[
    list[str] | None,
    typer.Option(help="pld, rdp or gdp; may be repeated. [dim]\\[default: all that can][/]"),
]
SearchRuns = Annotated[
    float | None,
    typer.Option(help="Expected number of such runs; the best one is kept. Epsilon is that of the search (rdp only)."),
]
SearchDistribution = Annotated[
    str | None,
    typer.Option(help="Of the number of runs: geometric, logarithmic or poisson. [dim]\\[default: geometric][/]"),
]
SearchAlso = Annotated[
    list[str] | None,
    typer.Option(
        metavar="BATCHxSTEPS,...@SIGMA",
        help="Other settings that a run of the search may have; epsilon is that of the worst. May be repeated.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Draw epsilon over the steps; if sigma is asked for, over it."),
]


def command(
    sample_size: Annotated[int, typer.Option(help="Number of training samples N.")],
    batch_size: Annotated[
        int | None, typer.Option(help="Expected logical batch in samples, drawn by Poisson sampling.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Length in expected passes over the samples.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in optimizer steps; instead of --epochs.")] = None,
    phases: Phases = None,
    noise_multiplier: Sigma = None,
    target_epsilon: Annotated[
        float | None, typer.Option("--target-epsilon", "--epsilon", help="Budget epsilon of the whole run.")
    ] = None,
    target_delta: Annotated[
        float, typer.Option("--target-delta", "--delta", help="Delta, a probability well below 1/N.")
    ] = 1e-5,
    max_batch_size: Cap = None,
    noise: Annotated[str, typer.Option(help="gaussian, or discrete-gaussian (rdp only).")] = "gaussian",
    elements: Annotated[
        int | None, typer.Option(help="Trainable elements of the model, which discrete noise asks for.")
    ] = None,
    sampling: correlated.Sampling = "poisson",
    correlation: correlated.Name = None,
    bands: correlated.Bands = None,
    accountant: Accountants = None,
    search_runs: SearchRuns = None,
    search_distribution: SearchDistribution = None,
    search_also: SearchAlso = None,
    plot: Picture = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compute what a DP-SGD run costs (epsilon), the noise that it needs, or the steps that a budget allows.

    Give two of length, noise and budget; the third is computed, by several accountants side by side.

    For example: dpshard account --sample-size 60000 --batch-size 256 --epochs 60 --sigma 1.1
    """
    length = next((x for x in (phases, epochs, steps) if x is not None), None)
    schedule = _schedule(sample_size, batch_size, epochs, steps if length is not None else 1, phases)
    run = SampledMechanism(
        schedule=schedule,
        sample_size=sample_size,
        noise_multiplier=math.nan if noise_multiplier is None else noise_multiplier,
        max_batch_size=max_batch_size,
        discretized_elements=_grid_elements(noise, elements),
    )
    plan = Plan(
        unknown=_unknown(steps=length, epsilon=target_epsilon, noise_multiplier=noise_multiplier),
        mechanism=correlated.parse(run, sampling, correlation, bands, of_known_length=length is not None),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        search=_search(search_runs, search_distribution, search_also or [], sample_size),
    )
    # The table says what the warning about gdp says.
    chosen = accountant or _able(plan)
    warnings.filterwarnings("ignore", message="accountant='gdp'")
    with console.err.status("computing ..."):
        answers = [work_out(plan, cast(AccountantName, name)) for name in chosen]
        if plot is not None:
            draw(plan, answers, plot)
    if as_json:
        typer.echo(to_json({"asked": plan.unknown, "plan": plan.known(), "answers": list(map(asdict, answers))}, 2))
    else:
        _print(plan, answers)


def _search(mean_runs: float | None, distribution: Any, also: Sequence[str], sample_size: int) -> Search | None:
    if mean_runs is None:
        if distribution is not None or also:
            name = "--search-also" if also else "--search-distribution"
            raise ConfigurationError(f"{name} is of a search: say how long it is, by --search-runs.")
        return None
    others = tuple(_candidate(text, sample_size) for text in also)
    return Search(mean_runs, "geometric" if distribution is None else distribution, others)


def _unknown(**given: object) -> Any:
    unknown = [name for name, value in given.items() if value is None]
    if len(unknown) != 1:
        raise ConfigurationError(
            "Give two of three, and the third is computed: the length (--epochs, --steps or --phases), the noise "
            "(--noise-multiplier), the budget (--target-epsilon)."
        )
    return unknown[0]


def _candidate(text: str, sample_size: int) -> Counts:
    phases, _, sigma = text.partition("@")
    try:
        noise_multiplier = float(sigma)
    except ValueError as error:
        raise ConfigurationError(f"--search-also {text}: write BATCHxSTEPS,...@SIGMA, such as 128x500@1.1.") from error
    schedule = BatchSchedule.parse(parse_phases(phases), sample_size=sample_size)
    return SampledMechanism(schedule=schedule, sample_size=sample_size, noise_multiplier=noise_multiplier).releases()


def _grid_elements(noise: str, elements: int | None) -> int | None:
    check_choice("noise", noise, get_args(NoiseName))
    if (noise == "discrete-gaussian") != (elements is not None):
        raise ConfigurationError(
            "--noise discrete-gaussian and --elements N go together: sums are rounded to a grid, and what that costs "
            "depends on the number of trainable elements."
        )
    return elements


def _able(plan: Plan) -> Sequence[str]:
    if isinstance(plan.mechanism, CorrelatedMechanism):
        return ["pld"] if plan.search is None else ["rdp"]
    if plan.search is not None or plan.mechanism.discretized_elements is not None:
        return ["rdp"]
    if plan.mechanism.max_batch_size is not None:
        return ["pld"]
    return ACCOUNTANTS if plan.target_epsilon is None else [name for name in ACCOUNTANTS if name != "gdp"]


def _schedule(
    sample_size: int, batch_size: int | None, epochs: float | None, steps: int | None, phases: str | None
) -> BatchSchedule:
    if phases is not None:
        if any(x is not None for x in (batch_size, epochs, steps)):
            raise ConfigurationError("--phases says it all: leave --batch-size, --epochs and --steps out.")
        return BatchSchedule.parse(parse_phases(phases), sample_size=sample_size)
    if batch_size is None:
        raise ConfigurationError("Say how large a logical batch is: --batch-size, or --phases.")
    return BatchSchedule.parse(batch_size, sample_size=sample_size, epochs=epochs, steps=steps)


def work_out(plan: Plan, accountant: AccountantName) -> Answer:
    """Return the unknown of `plan`, and epsilon of the completed run."""
    run, question = plan.mechanism, plan.question(accountant)
    budget: Any = plan.target_epsilon  # not None unless epsilon is unknown
    if plan.unknown == "noise_multiplier":
        run = calibrate(run, target_epsilon=budget, **question)
    steps = run.schedule.steps
    if plan.unknown == "steps" and isinstance(run, SampledMechanism):
        steps = steps_for_epsilon(run.release(0), target_epsilon=budget, **question)
    bound = compute_bound(plan.releases(run.noise_multiplier, steps), **question)
    return Answer(
        accountant=accountant,
        epsilon=bound.epsilon,
        found_by=bound.accountant,
        noise_multiplier=run.noise_multiplier,
        steps=steps,
        neighbouring_relation=_relation(run),
        upper_bound=accountant != "gdp",
        error_over_dp_sgd=correlated.error_over_dp_sgd(run, bound.epsilon, **question),
    )


def _relation(run: SampledMechanism | CorrelatedMechanism) -> str:
    return "zero-out" if isinstance(run, CorrelatedMechanism) else relation_of([run.release(0)])


def _print(plan: Plan, answers: Sequence[Answer]) -> None:
    run, phases = plan.mechanism, plan.mechanism.schedule.phases()
    size = " then ".join(f"{size:,}" for size, _ in phases)
    sampling = run.sampling if isinstance(run, CorrelatedMechanism) else "Poisson"
    table = Table(
        title=f"N = {run.sample_size:,}, batch {size} ({sampling}), δ = {plan.target_delta:g}", title_justify="left"
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
    console.out.print(table)
    if len(phases) > 1:
        steps, largest = run.schedule.steps, max(run.schedule.sizes)
        console.out.print(
            f"Samples drawn, as expected: {plan.samples:,} ({plan.samples / run.sample_size:.3g} epochs), "
            f"{1 - plan.samples / (largest * steps):.1%} fewer than in {steps:,} steps of {largest:,}."
        )
    if plan.search is not None:
        console.out.print(
            f"ε is that of the best of K such runs, K secret and {plan.search.distribution} with mean "
            f"{plan.search.mean_runs:g}; choose it by a score that is public, or private itself and charged."
        )
        console.out.print(
            f"It covers runs of {1 + len(plan.search.others)} settings of noise, batch and steps, and costs what the "
            f"worst costs. Name further ones by --search-also."
        )
    for answer in answers:
        if answer.error_over_dp_sgd is not None:
            console.out.print(correlated.in_words(run, answer.error_over_dp_sgd))
    name = answers[0].neighbouring_relation
    console.out.print(f"Neighbours: {name}: {NEIGHBOURS[name]}.")
    for answer in answers:
        if answer.steps == 0:
            console.out.print(f"{answer.accountant}: not even one step fits the budget.")
        elif answer.epsilon == 0:
            console.out.print(
                f"{answer.accountant}: with so much noise δ alone covers the run; less gives no ε so small."
            )


def draw(plan: Plan, answers: Sequence[Answer], path: Path) -> None:
    """Draw epsilon over the steps, or over sigma if that was unknown."""
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
        ax.set_title(f"ε {length}at δ = {plan.target_delta:g}")
        ax.set_xlabel("noise multiplier σ" if over_sigma else "steps")
        ax.set_ylim(bottom=0)
        ax.legend()
        plots.save(figure, path)
    console.err.print(f"Drawn to {path}")


def _more_or_less_noise(answer: Answer) -> list[tuple[float, int]]:
    """Return (sigma, steps) for 0.8 to 1.4 times the noise."""
    return [(answer.noise_multiplier * 2 ** (k / 16), answer.steps) for k in range(-5, 9)]


def _shorter_runs(plan: Plan, answer: Answer) -> list[tuple[float, int]]:
    if not answer.steps:
        return []
    lengths = {math.ceil(answer.steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    # The curve has a kink at the end of a phase.
    ends = itertools.accumulate(count for _, count in plan.mechanism.schedule.phases())
    return [(answer.noise_multiplier, steps) for steps in sorted(lengths | {1} | set(ends))]
