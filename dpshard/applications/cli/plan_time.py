"""Times and costs of `dpshard plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dpshard.accounting import rounded_up
from dpshard.accounting.releases import in_figures
from dpshard.applications.cli import console
from dpshard.applications.cli.run_folder import write_json

if TYPE_CHECKING:
    from dpshard.applications.planner import Estimate, Plan
    from dpshard.applications.planner.hardware import Hardware
    from dpshard.applications.planner.pipelines import PipelineEstimate
    from dpshard.applications.planner.run_cost import Run, RunCost

GIB = 2**30
NODES = (1, 2, 4, 8, 16)

AddRow = Callable[..., None]


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a whole run costs."""

    run: Run
    noise_multiplier: float
    epsilon: float
    by_label: dict[str, RunCost | None]


def new_table(title: str, estimates: Sequence[Estimate] | Sequence[PipelineEstimate]) -> tuple[Table, AddRow]:
    """Return a table with a column for each estimate, and what adds a row."""
    table = console.plain_table(title, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for estimate in estimates:
        table.add_column(estimate.label.replace(", ", "\n"), justify="right")

    def add(name: str, values: Callable[[Any], str], style: str = "") -> None:
        table.add_row(name, *map(values, estimates), style=style)

    return table, add


def offloaded(plan: Plan, estimate: Estimate) -> float:
    """Return the GiB of records in a host's memory."""
    return plan.setup.node * plan.spilled(estimate) / GIB


def add_rows(plan: Plan, hardware: Hardware, add: AddRow) -> None:
    """Add times of the counted step."""
    times = {e.label: plan.times(e, hardware) for e in plan.estimates}
    add("seconds", lambda e: f"{times[e.label].total:,.3g}", "bold")
    for phase in ("forward", "backward", "update"):
        add(f"  {phase}", lambda e, phase=phase: f"{times[e.label].phases.get(phase, 0):,.3g}", "dim")
    add("  of it computing", lambda e: f"{times[e.label].computing:,.3g}", "dim")
    add("  network busy", lambda e: f"{times[e.label].sending:,.3g}", "dim")
    add(f"{unit(plan)}/s per GPU", lambda e: f"{plan.rate(e, hardware):,.0f}")


def add_rates(plan: Plan, hardware: Hardware, add: AddRow) -> None:
    """Add speeds at the largest micro-batches."""

    def rate(estimate: Estimate) -> str:
        largest = estimate.largest_micro_batch
        return f"{plan.rate(estimate, hardware, largest):,.0f}" if largest else "-"

    add(f"  {unit(plan)}/s per GPU there", rate, "bold green")


def unit(plan: Plan) -> str:
    """Return what a speed counts."""
    return "tokens" if plan.positions > 1 else "images"


def assumptions(hardware: Hardware) -> str:
    """Return a sentence with the speeds."""
    return (
        f"Times are estimates: {hardware.gpu} at {hardware.mfu:.0%} of its peak, {hardware.intra:g} GB/s within a node "
        f"of {hardware.node}, {hardware.inter:g} GB/s between nodes, {1e6 * hardware.latency:g} us of latency."
    )


def advice(plan: Plan, hardware: Hardware) -> list[str]:
    """Return sentences about time."""
    from dpshard.applications.planner.counts import RECORDS
    from dpshard.applications.planner.timeline import parallel_share

    said: dict[str, list[str]] = {}
    for e in plan.estimates:
        times = plan.times(e, hardware)
        samples = plan.micro_batch * times.sending / times.computing
        binds = (
            f"The network binds below {samples:,.1f} samples a rank and micro-batch: a batch of B samples feeds "
            f"B / {samples:,.1f} data ranks at most"
            if samples > 1
            else f"The network does not bind: one sample computes {1 / samples:,.1f} times as long as the step sends"
        )
        said.setdefault(binds, []).append(e.label)
        if (leaves := plan.spilled(e)) > GIB:
            moves = (
                f'offload_records="auto" moves {leaves / GIB:,.1f} of {e.parts[RECORDS] / GIB:,.1f} GiB out and in '
                f"beside the products, {leaves / (hardware.pcie * 1e9):,.2g} s each way at {hardware.pcie:g} GB/s, "
                f"and needs {offloaded(plan, e):,.0f} GiB of memory in each host"
            )
            said.setdefault(moves, []).append(e.label)
    own = plan.setup.ranks
    for e in plan.estimates[:2]:
        speeds = [(n, n / plan.times_on(e, hardware, n * own).total) for n in NODES]
        share = (
            f"Amdahl's law: a parallel share of {parallel_share(speeds):.2%} fits {own:,} to {NODES[-1] * own:,} ranks "
            f"with as many samples each"
        )
        said.setdefault(share, []).append(e.label)
    return [f"{text} [{'; '.join(labels)}]." for text, labels in said.items()]


def run_costs(plan: Plan, run: Run, hardware: Hardware) -> RunCosts:
    """Return the costs of a run."""
    from dpshard.applications.planner.run_cost import best_run_cost

    sigma, epsilon = run.guarantee()
    return RunCosts(run, sigma, epsilon, {e.label: best_run_cost(plan, e, run, hardware) for e in plan.estimates})


def print_run(plan: Plan, costs: RunCosts) -> None:
    """Print a run."""
    run = costs.run
    console.out.print(
        f"\n{run.steps:,} steps of {run.batch_size:,} of {run.sample_size:,} samples: sigma "
        f"{rounded_up(costs.noise_multiplier)}, epsilon {rounded_up(costs.epsilon)} at delta "
        f"{in_figures(run.target_delta)}, sigma / batch "
        f"{costs.noise_multiplier / run.batch_size:.3g}."
    )
    names = ("", "micro-batch", "micro-batches", "padding", "s a step", "GPU-hours")
    table = console.plain_table(columns=names)
    for label, cost in costs.by_label.items():
        if cost is None:
            table.add_row(label, "none fits")
            continue
        table.add_row(
            label, f"{cost.micro_batch:,}", f"{cost.micro_batches:.2f}", f"{cost.padding:.0%}",
            f"{cost.step_seconds:,.3g}", f"{cost.gpu_hours:,.0f}",
        )  # fmt: skip
    console.out.print(table)
    console.out.print(
        f"[dim]The micro-batch is the cheapest that fits. Of a Poisson batch, {plan.setup.data_ranks:,} data ranks "
        f"take equal shares; the rest of their last micro-batch is padding.[/]"
    )


def figures(plan: Plan, hardware: Hardware, costs: RunCosts | None) -> dict[str, Any]:
    """Return plain values."""
    found: dict[str, Any] = {"hardware": asdict(hardware), "seconds_of_a_step": {}}
    for e in plan.estimates:
        times = plan.times(e, hardware)
        found["seconds_of_a_step"][e.label] = {
            **times.phases,
            "computing": times.computing,
            "sending": times.sending,
            "rate_per_gpu": plan.rate(e, hardware),
            "rate_at_largest": plan.rate(e, hardware, e.largest_micro_batch) if e.largest_micro_batch else None,
            "host_gib_of_records": offloaded(plan, e),
        }
    if costs is not None:
        by_label = {label: None if cost is None else asdict(cost) for label, cost in costs.by_label.items()}
        guarantee = {"sigma": costs.noise_multiplier, "epsilon": costs.epsilon}
        found["run"] = asdict(costs.run) | guarantee | {"costs": by_label}
    return found


def print_frontier(
    budget: str, seq: int | None, hardware: Hardware, as_json: Path | None, report: Callable[[str], None]
) -> None:
    """Print what a budget buys."""
    from dpshard.applications.planner.frontier import frontier, parse_means

    means = parse_means(budget, seq)
    points = frontier(means, hardware, report)
    console.out.print(
        f"What {means.gpu_hours:,.0f} GPU-hours buy at epsilon {means.epsilon:g}, delta {means.delta:g}, of "
        f"{means.sample_size:,} samples of {means.seq:,} tokens"
    )
    names = ("parameters", "batch", "steps", "epochs", "tokens/parameter", "sigma", "sigma / batch")
    table = console.plain_table(columns=names)
    for point in points:
        samples = point.batch_size * point.steps
        table.add_row(
            f"{point.parameters / 1e9:g} billion", f"{point.batch_size:,}", f"{point.steps:,}",
            f"{samples / means.sample_size:.3g}", f"{samples * means.seq / point.parameters:,.3g}",
            f"{point.noise_multiplier:.4g}", f"{point.noise_per_batch:.3g}",
        )  # fmt: skip
    console.out.print(table)
    if not points:
        console.out.print("No model of 0.3 to 10 billion parameters gets 100 steps. Take more GPU-hours.")
    console.out.print(
        f"[dim]6 operations per parameter and token, and 7% for privacy. {assumptions(hardware)} At one sigma / batch, "
        f"more steps help; at one number of steps, less noise does (McKenna et al. 2025, arXiv:2501.18914).[/]"
    )
    if as_json is not None:
        write_json(as_json, {"means": asdict(means), "points": [asdict(point) for point in points]}, public=True)
