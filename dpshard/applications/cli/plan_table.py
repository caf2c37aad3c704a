"""Tables, figures and plot of `dpshard plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dpshard.accounting import rounded_up
from dpshard.accounting.releases import in_figures
from dpshard.applications.cli import console, plots
from dpshard.applications.cli.run_folder import write_json
from dpshard.applications.planner import Estimate, Plan
from dpshard.applications.planner.advice import advise, advise_on_time
from dpshard.applications.planner.counts import PARTS
from dpshard.applications.planner.estimates import GIB, zero_model_states
from dpshard.applications.planner.frontier import frontier, parse_means
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.pipelines import PipelineEstimate
from dpshard.applications.planner.run_cost import RunCosts

AddRow = Callable[..., None]


def show(
    plan: Plan, hardware: Hardware, costs: RunCosts | None, seconds: float, as_json: Path | None, plot: Path | None
) -> None:
    """Print a plan, write its figures, and draw it."""
    advice = [*advise(plan), *advise_on_time(plan, hardware)]
    if as_json is not None:
        write_json(as_json, _figures(plan, hardware, costs, advice, seconds), public=True)
    if plot is not None:
        draw(plan, plot)
    _print(plan, hardware, costs, advice, seconds)


def new_table(title: str, estimates: Sequence[Estimate] | Sequence[PipelineEstimate]) -> tuple[Table, AddRow]:
    """Return a table with a column for each estimate, and what adds a row."""
    table = console.plain_table(title, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for estimate in estimates:
        table.add_column(estimate.label.replace(", ", "\n"), justify="right")

    def add(name: str, values: Callable[[Any], str], style: str = "") -> None:
        table.add_row(name, *map(values, estimates), style=style)

    return table, add


def _print(plan: Plan, hardware: Hardware, costs: RunCosts | None, advice: Sequence[str], seconds: float) -> None:
    setup = plan.setup
    precision = "bfloat16, reduced in float32" if setup.precision == "bf16" else "float32"
    shard = setup.shard + "".join(f", {n} {size}" for n, size in (("tp", setup.tp), ("cp", setup.cp)) if size > 1)
    again = "activations computed again" if setup.checkpointing else "activations kept"
    console.out.print(
        f"[bold]{escape(str(setup.model))}[/], {plan.parameters / 1e9:,.1f} billion parameters, on {setup.ranks} ranks "
        f"({shard}), {setup.micro_batches} x {plan.micro_batch} samples per rank and step, {precision}, {again}"
    )
    console.out.print(_table(plan, hardware))
    console.out.print(f"[dim]{assumptions(hardware)}[/]")
    if costs is not None:
        _print_run(plan, costs)
    sizes = zero_model_states(plan.parameters, setup.ranks)
    states = "; ".join(f"{stage} {size / GIB:,.1f}" for stage, size in sizes.items())
    console.out.print(f"By formula, GiB per rank of parameters, gradients and Adam states: {states}.")
    for sentence in advice:
        console.out.print(f"• {escape(sentence)}")
    console.out.print(
        f"[dim]Counted in {seconds:.0f} s. Bytes are those of tensors: leave a tenth for allocator and libraries.[/]"
    )


def _table(plan: Plan, hardware: Hardware) -> Table:
    table, add = new_table("A step of one rank", plan.estimates)
    add("TFLOP", lambda e: f"{e.flops / 1e12:,.1f}")
    add("peak GiB", lambda e: f"{e.peak / GIB:,.1f}", "bold")
    for part in PARTS:
        add(f"  {part}", lambda e, part=part: f"{e.parts[part] / GIB:,.1f}", "dim")
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        if any(e.sent(kind).nbytes > 1024 for e in plan.estimates):
            add(f"{kind} GiB", lambda e, kind=kind: f"{e.sent(kind).nbytes / GIB:,.1f}")
            add("  calls", lambda e, kind=kind: f"{e.sent(kind).calls:,}", "dim")
    add("host GiB, if records\n  are offloaded", lambda e: f"{plan.host_gib(e):,.1f}", "dim")
    times = {e.label: plan.times(e, hardware) for e in plan.estimates}
    add("seconds", lambda e: f"{times[e.label].total:,.3g}", "bold")
    for phase in ("forward", "backward", "update"):
        add(f"  {phase}", lambda e, phase=phase: f"{times[e.label].phases.get(phase, 0):,.3g}", "dim")
    add("  of it computing", lambda e: f"{times[e.label].computing:,.3g}", "dim")
    add("  network busy", lambda e: f"{times[e.label].sending:,.3g}", "dim")
    speed = f"{'tokens' if plan.positions > 1 else 'images'}/s per GPU"
    add(speed, lambda e: f"{plan.rate(e, hardware):,.0f}")
    if plan.gpu_memory is not None:
        largest = f"max. micro-batch\n  in {plan.gpu_memory / GIB:g} GiB"
        add(largest, lambda e: f"{e.largest_micro_batch:,}" if e.largest_micro_batch else "none", "bold green")
        there = {e.label: _rate_at_largest(plan, e, hardware) for e in plan.estimates}
        add(f"  {speed} there", lambda e: "-" if (rate := there[e.label]) is None else f"{rate:,.0f}", "bold green")
    return table


def _rate_at_largest(plan: Plan, estimate: Estimate, hardware: Hardware) -> float | None:
    largest = estimate.largest_micro_batch
    return plan.rate(estimate, hardware, largest) if largest else None


def assumptions(hardware: Hardware) -> str:
    """Return a sentence with the speeds."""
    return (
        f"Times are estimates: {hardware.gpu} at {hardware.mfu:.0%} of its peak, {hardware.intra:g} GB/s within a node "
        f"of {hardware.node}, {hardware.inter:g} GB/s between nodes, {1e6 * hardware.latency:g} us of latency."
    )


def _print_run(plan: Plan, costs: RunCosts) -> None:
    run = costs.run
    console.out.print(
        f"\n{run.steps:,} steps of {run.batch_size:,} of {run.sample_size:,} samples: sigma "
        f"{rounded_up(costs.noise_multiplier)}, epsilon {rounded_up(costs.epsilon)} at delta "
        f"{in_figures(run.target_delta)}, sigma / batch {costs.noise_multiplier / run.batch_size:.3g}."
    )
    table = console.plain_table(columns=("", "micro-batch", "micro-batches", "padding", "s a step", "GPU-hours"))
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


def _figures(
    plan: Plan, hardware: Hardware, costs: RunCosts | None, advice: Sequence[str], seconds: float
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "setup": asdict(plan.setup),
        "micro_batch": plan.micro_batch,
        "parameters": plan.parameters,
        "gpu_memory_bytes": plan.gpu_memory,
        "estimates": [
            {
                "name": e.label,
                "clipping": None if e.clipping is None else asdict(e.clipping),
                "flops": e.flops,
                "peak_bytes": e.peak,
                "parts_bytes": e.parts,
                "collectives": [
                    {"kind": kind, "dtype": dtype, "calls": traffic.calls, "bytes": traffic.nbytes}
                    for (kind, dtype), traffic in e.traffic.items()
                ],
                "largest_micro_batch": e.largest_micro_batch,
            }
            for e in plan.estimates
        ],
        "model_states_bytes": zero_model_states(plan.parameters, plan.setup.ranks),
        "advice": advice,
        "seconds": seconds,
        "hardware": asdict(hardware),
        "seconds_of_a_step": {
            e.label: {
                **(times := plan.times(e, hardware)).phases,
                "computing": times.computing,
                "sending": times.sending,
                "rate_per_gpu": plan.rate(e, hardware),
                "rate_at_largest": _rate_at_largest(plan, e, hardware),
                "host_gib_of_records": plan.host_gib(e),
            }
            for e in plan.estimates
        },
    }
    if costs is not None:
        guarantee = {"sigma": costs.noise_multiplier, "epsilon": costs.epsilon}
        found["run"] = asdict(costs.run) | guarantee | {"costs": asdict(costs)["by_label"]}
    return found


def draw(plan: Plan, path: Path) -> None:
    """Draw memory and FLOPs."""
    estimates = plan.estimates[::-1]
    labels = [estimate.label for estimate in estimates]
    with plots.styled():
        figure = plots.new_figure(figsize=(10, 1.2 + 0.5 * len(estimates)))
        memory, work = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        left = [0.0] * len(estimates)
        colours = (*plots.COLOURS, "#b0b7c3", "#e9a23b")
        for part, colour in zip(PARTS, colours, strict=True):
            sizes = [estimate.parts[part] / GIB for estimate in estimates]
            memory.barh(labels, sizes, left=left, color=colour, label=part, height=0.6)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        if plan.gpu_memory is not None:
            memory.axvline(plan.gpu_memory / GIB, color="0.3", linewidth=1, linestyle="--")
        memory.set_title("Peak memory of a rank (GiB)")
        work.barh(labels, [estimate.flops / 1e12 for estimate in estimates], color="0.6", height=0.6)
        work.set_title("TFLOP a step")
        figure.legend(loc="outside lower center", ncols=len(PARTS))
        plots.save(figure, path)


def print_frontier(
    budget: str, seq: int | None, hardware: Hardware, as_json: Path | None, report: Callable[[str], None]
) -> None:
    """Print what a budget buys."""
    means = parse_means(budget, seq)
    points = frontier(means, hardware, report)
    console.out.print(
        f"What {means.gpu_hours:,.0f} GPU-hours buy at epsilon {means.epsilon:g}, delta {in_figures(means.delta)}, of "
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
