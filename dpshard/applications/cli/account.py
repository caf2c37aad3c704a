"""`dpshard account`: what a run costs, how much noise it needs, or how many steps a budget allows."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.table import Table

from dpshard.applications.cli import console, plots
from dpshard.applications.cli.formats import NEIGHBOURS, to_json
from dpshard.applications.cli.settings import parse_phases
from dpshard.config import AccountantName, BatchSchedule, NoiseName, check_choice
from dpshard.errors import ConfigurationError

if TYPE_CHECKING:
    from dpshard.accounting import Search

Phases = list[tuple[int, int]]
"""[(expected batch size, steps), ...]."""

ACCOUNTANTS: tuple[AccountantName, ...] = get_args(AccountantName)
CERTAINTY = {"pld": "upper bound, tight", "rdp": "upper bound", "gdp": "approximation, may under-state ε"}
CURVE_POINTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run of which two are known: length, noise, budget."""

    sample_size: int
    phases: Phases
    """Expected batch sizes and steps; if the length is asked for, a single phase of 0 steps."""
    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float
    max_batch_size: int | None
    grid_elements: int | None
    """Elements of a model that is trained with discrete Gaussian noise; None of Gaussian noise."""
    search: Search | None = None
    """How many such runs there are, of which the best is kept; None for a single run. The budget is that of all."""

    @property
    def steps(self) -> int:
        """Length of the run; 0 if it is asked for."""
        return sum(count for _, count in self.phases)

    @property
    def unknown(self) -> str:
        """What is asked for: the name of a field of Answer."""
        return "steps" if not self.steps else "epsilon" if self.target_epsilon is None else "noise_multiplier"

    def __post_init__(self) -> None:
        if [self.steps > 0, self.noise_multiplier is not None, self.target_epsilon is not None].count(True) != 2:
            raise ConfigurationError(
                "Give two of three, and the third is computed: the length (--epochs, --steps or --phases), the noise "
                "(--noise-multiplier), the budget (--target-epsilon)."
            )

    def known(self) -> dict[str, Any]:
        """What is known, for JSON: a length that is asked for is null."""
        return asdict(self) | {
            "phases": [(size, steps or None) for size, steps in self.phases],
            "samples": self.samples,
        }

    @property
    def samples(self) -> int:
        """Expected number of samples that are drawn; 0 if the length is asked for."""
        return sum(size * count for size, count in self.phases)

    @property
    def saved(self) -> float:
        """Share of these samples that the schedule saves against its largest batch at every step."""
        return 1 - self.samples / (max(size for size, _ in self.phases) * self.steps)

    def common(self, accountant: AccountantName) -> dict[str, Any]:
        """The arguments that all functions of dpshard.accounting share."""
        return {
            "sample_size": self.sample_size,
            "target_delta": self.target_delta,
            "max_batch_size": self.max_batch_size,
            "grid_elements": self.grid_elements,
            "accountant": accountant,
            "search": self.search,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one accountant says about a run."""

    accountant: AccountantName
    epsilon: float
    """Of the whole run."""
    noise_multiplier: float
    steps: int
    neighbouring_relation: str
    upper_bound: bool
    """Whether the true epsilon is certainly not larger."""
    found_by: str
    """The accountant of which the figure is: "rdp" where "pld" was asked and "rdp" bounds more tightly."""


def command(
    sample_size: Annotated[int, typer.Option(help="Number of training samples N.")],
    batch_size: Annotated[
        int | None, typer.Option(help="Expected logical batch in samples, drawn by Poisson sampling.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Length in expected passes over the samples.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in optimizer steps; instead of --epochs.")] = None,
    phases: Annotated[
        str | None, typer.Option(help="Schedule BATCHxSTEPS,...: e.g. 128x50,512x100; instead of size and length.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            "--noise-multiplier", "--sigma", help="Noise sigma: standard deviation over the sensitivity, unitless."
        ),
    ] = None,
    target_epsilon: Annotated[
        float | None, typer.Option("--target-epsilon", "--epsilon", help="Budget epsilon of the whole run.")
    ] = None,
    target_delta: Annotated[
        float, typer.Option("--target-delta", "--delta", help="Delta, a probability well below 1/N.")
    ] = 1e-5,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Cap of a logical batch in samples: truncated Poisson sampling (pld only).")
    ] = None,
    noise: Annotated[str, typer.Option(help="gaussian, or discrete-gaussian (rdp only).")] = "gaussian",
    elements: Annotated[
        int | None, typer.Option(help="Trainable elements of the model, which discrete noise asks for.")
    ] = None,
    accountant: Annotated[
        list[str] | None,
        typer.Option(help="pld, rdp or gdp; may be repeated. [dim]\\[default: all that can][/]"),
    ] = None,
    search_runs: Annotated[
        float | None,
        typer.Option(
            help="Expected number of such runs, of which the best is kept: epsilon is that of the search (rdp only)."
        ),
    ] = None,
    search_distribution: Annotated[
        str | None,
        typer.Option(help="Of the number of runs: geometric, logarithmic or poisson. [dim]\\[default: geometric][/]"),
    ] = None,
    search_also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxSTEPS,...@SIGMA",
            help="Other settings that a run of the search may have; epsilon is that of the worst. May be repeated.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw epsilon over the steps; if sigma is asked for, over it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compute what a DP-SGD run costs (epsilon), the noise that it needs, or the steps that a budget allows.

    Give two of length, noise and budget; the third is computed, by several accountants side by side.

    For example: dpshard account --sample-size 60000 --batch-size 256 --epochs 60 --sigma 1.1
    """
    search = _search(search_runs, search_distribution, search_also or [], sample_size)
    plan = Plan(
        sample_size=sample_size,
        phases=_phases(sample_size, batch_size, epochs, steps, phases),
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        max_batch_size=max_batch_size,
        grid_elements=_grid_elements(noise, elements),
        search=search,
    )
    # What the warning about gdp says, the table says.
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
    from dpshard.accounting import Search

    others = tuple(_candidate(text, sample_size) for text in also)
    return Search(mean_runs, "geometric" if distribution is None else distribution, others)


def _candidate(text: str, sample_size: int) -> Any:
    """What a run of `text`, BATCHxSTEPS,...@SIGMA, releases."""
    from dpshard.accounting import planned_releases

    phases, _, sigma = text.partition("@")
    try:
        noise_multiplier = float(sigma)
    except ValueError as error:
        raise ConfigurationError(f"--search-also {text}: write BATCHxSTEPS,...@SIGMA, such as 128x500@1.1.") from error
    schedule = BatchSchedule.parse(parse_phases(phases), sample_size=sample_size)
    return planned_releases(schedule.phases(), noise_multiplier=noise_multiplier, sample_size=sample_size)


def _grid_elements(noise: str, elements: int | None) -> int | None:
    check_choice("noise", noise, get_args(NoiseName))
    if (noise == "discrete-gaussian") != (elements is not None):
        raise ConfigurationError(
            "--noise discrete-gaussian and --elements N go together: sums are rounded to a grid, and what that costs "
            "depends on the number of trainable elements."
        )
    return elements


def _able(plan: Plan) -> Sequence[str]:
    """The accountants that can analyse `plan`."""
    if plan.search is not None or plan.grid_elements is not None:
        return ["rdp"]
    if plan.max_batch_size is not None:
        return ["pld"]
    return ACCOUNTANTS if plan.target_epsilon is None else [name for name in ACCOUNTANTS if name != "gdp"]


def _phases(
    sample_size: int, batch_size: int | None, epochs: float | None, steps: int | None, phases: str | None
) -> Phases:
    if phases is not None:
        if any(x is not None for x in (batch_size, epochs, steps)):
            raise ConfigurationError("--phases says it all: leave --batch-size, --epochs and --steps out.")
        return BatchSchedule.parse(parse_phases(phases), sample_size=sample_size).phases()
    if batch_size is None:
        raise ConfigurationError("Say how large a logical batch is: --batch-size, or --phases.")
    if epochs is None and steps is None:
        BatchSchedule.parse(batch_size, sample_size=sample_size, steps=1)  # refuses impossible sizes
        return [(batch_size, 0)]
    return BatchSchedule.parse(batch_size, sample_size=sample_size, epochs=epochs, steps=steps).phases()


def work_out(plan: Plan, accountant: AccountantName) -> Answer:
    """The unknown of `plan`, and epsilon of the run that it completes."""
    from dpshard.accounting import (
        calibrate_noise_multiplier,
        compute_bound,
        poisson_relation,
        relation_name,
        steps_for_epsilon,
    )

    common, phases = plan.common(accountant), plan.phases
    sigma: Any = plan.noise_multiplier  # of sigma and budget, one or both are there: __post_init__
    budget: Any = plan.target_epsilon
    if plan.unknown == "steps":
        size = phases[0][0]
        phases = [(size, steps_for_epsilon(size, noise_multiplier=sigma, target_epsilon=budget, **common))]
    elif plan.unknown == "noise_multiplier":
        sigma = calibrate_noise_multiplier(phases, target_epsilon=budget, **common)
    steps = sum(count for _, count in phases)
    bound = compute_bound(phases, noise_multiplier=sigma, **common) if steps else None
    return Answer(
        accountant=accountant,
        epsilon=bound.epsilon if bound else 0.0,
        found_by=bound.accountant if bound else accountant,
        noise_multiplier=sigma,
        steps=steps,
        neighbouring_relation=relation_name(poisson_relation(plan.max_batch_size)),
        upper_bound=accountant != "gdp",
    )


def _print(plan: Plan, answers: Sequence[Answer]) -> None:
    from dpshard.accounting import rounded_up

    size = " then ".join(f"{size:,}" for size, _ in plan.phases)
    table = Table(
        title=f"N = {plan.sample_size:,}, batch {size} (Poisson), δ = {plan.target_delta:g}", title_justify="left"
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
    if len(plan.phases) > 1:
        console.out.print(
            f"Samples drawn, as expected: {plan.samples:,} ({plan.samples / plan.sample_size:.3g} epochs), "
            f"{plan.saved:.1%} fewer than in {plan.steps:,} steps of {max(size for size, _ in plan.phases):,}."
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
    """Draw epsilon over the steps of the run, or over sigma if that was asked for."""
    from dpshard.accounting import compute_epsilon

    over_sigma = plan.unknown == "noise_multiplier"
    with plots.styled():
        figure = plots.new_figure(figsize=(6.4, 4))
        ax = figure.subplots()
        for answer in answers:
            colour = plots.COLOURS[ACCOUNTANTS.index(answer.accountant)]
            runs = _more_or_less_noise(plan, answer) if over_sigma else _shorter_runs(plan, answer)
            common = plan.common(answer.accountant)
            ys = [compute_epsilon(phases, noise_multiplier=sigma, **common) for _, phases, sigma in runs]
            line = "-" if answer.upper_bound else ":"
            ax.plot([x for x, _, _ in runs], ys, line, color=colour, label=answer.accountant)
            ax.plot(answer.noise_multiplier if over_sigma else answer.steps, answer.epsilon, "o", color=colour)
        if plan.target_epsilon is not None:
            ax.axhline(plan.target_epsilon, color="0.4", linewidth=1, linestyle="--", label="budget")
        ax.set_title(f"ε {f'of {plan.steps:,} steps ' if over_sigma else ''}at δ = {plan.target_delta:g}")
        ax.set_xlabel("noise multiplier σ" if over_sigma else "steps")
        ax.set_ylim(bottom=0)
        ax.legend()
        plots.save(figure, path)
    console.err.print(f"Drawn to {path}")


def _more_or_less_noise(plan: Plan, answer: Answer) -> list[tuple[float, Phases, float]]:
    """(sigma, phases, sigma) of the run with 0.8 to 1.4 times the noise."""
    sigmas = [answer.noise_multiplier * 2 ** (k / 16) for k in range(-5, 9)]
    return [(sigma, plan.phases, sigma) for sigma in sigmas]


def _shorter_runs(plan: Plan, answer: Answer) -> list[tuple[float, Phases, float]]:
    """(steps, phases, sigma) of the first steps of the run."""
    phases = plan.phases if plan.steps else [(plan.phases[0][0], answer.steps)]
    lengths = {math.ceil(answer.steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)} - {0}
    # The curve has a kink where a phase ends.
    lengths = sorted(lengths | {1} | set(itertools.accumulate(count for _, count in phases)) if lengths else set())
    return [(steps, _first(phases, steps), answer.noise_multiplier) for steps in lengths]


def _first(phases: Phases, steps: int) -> Phases:
    taken: Phases = []
    for size, count in phases:
        if steps > 0:
            taken.append((size, min(count, steps)))
            steps -= count
    return taken
