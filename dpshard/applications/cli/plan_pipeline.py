"""`dpshard plan --pp`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dpshard.applications.cli import console
from dpshard.applications.cli.plan_table import assumptions, new_table
from dpshard.applications.cli.run_folder import write_json
from dpshard.applications.planner.estimates import GIB
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.pipelines import PipelinePlan

SHOWN = 4


def show(
    plan: PipelinePlan, hardware: Hardware, gpu_memory: float | None, seconds: float, as_json: Path | None
) -> None:
    """Print a plan, and write its figures."""
    if as_json is not None:
        write_json(as_json, _figures(plan, hardware, seconds), public=True)
    setup = plan.setup
    of_stage = f" of {setup.tp} ranks each (tensor parallelism)" if setup.tp > 1 else ""
    console.out.print(
        f"[bold]{escape(str(setup.model))}[/], {sum(plan.elements) / 1e9:,.1f} billion parameters, "
        f"{_counted(plan.replicas, 'pipeline')} of {plan.pp} stages{of_stage} on {setup.ranks} ranks, "
        f"{_counted(setup.micro_batches, 'part')} of {_counted(plan.micro_batch, 'sample')}, 1F1B, {setup.precision}"
    )
    console.out.print(_table(plan, hardware))
    console.out.print(f"[dim]{assumptions(hardware)}[/]")
    parts = setup.micro_batches
    textbook = (plan.pp - 1) / (parts + plan.pp - 1)
    if setup.tp > 1:
        console.out.print(
            "• Private styles are not planned here: the engine refuses tensor parallelism within a stage, so it cannot "
            "train them yet."
        )
    if plan.pp > SHOWN:
        console.out.print(
            f"• Of {plan.pp} stages the table shows the {SHOWN} with the highest peaks; --json FILE has all."
        )
    console.out.print(
        f"• Equal stages without transfers would wait {textbook:.1%} of the span; more parts shorten this share."
    )
    if gpu_memory is not None:
        fits = {e.label: max(plan.peaks(e)) <= gpu_memory * GIB for e in plan.estimates}
        for said, wanted in (("Fits", True), ("Does not fit", False)):
            if labels := [label for label, fit in fits.items() if fit is wanted]:
                console.out.print(f"• {said} {gpu_memory:g} GiB: {'; '.join(labels)}.")
    console.out.print(f"[dim]Counted in {seconds:.0f} s. Leave a tenth for allocator and libraries.[/]")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _table(plan: PipelinePlan, hardware: Hardware) -> Table:
    table, add = new_table("A step", plan.estimates)
    times = {e.label: plan.times(e, hardware) for e in plan.estimates}
    peaks = {e.label: plan.peaks(e) for e in plan.estimates}
    worst = sorted(range(plan.pp), key=lambda s: -max(some[s] for some in peaks.values()))
    work = plan.setup.micro_batches * plan.setup.tp
    add("TFLOP, all stages", lambda e: f"{work * sum(s.forward + s.backward + s.sums for s in e.stages) / 1e12:,.0f}")
    add("seconds", lambda e: f"{times[e.label].total:,.3g}", "bold")
    fields = [("schedule", "span"), ("sums after it", "sums"), ("all-reduce", "reduction"), ("update",) * 2]
    if plan.setup.tp > 1:
        fields.insert(1, ("  of it, within stages", "within"))
    for name, field in fields:
        add(f"  {name}", lambda e, field=field: f"{getattr(times[e.label], field):,.3g}", "dim")
    add("stages wait", lambda e: f"{times[e.label].bubble:.1%}")
    add("tokens/s per GPU", lambda e: f"{plan.rate(e, hardware):,.0f}", "bold")
    add("peak GiB, worst stage", lambda e: f"{max(peaks[e.label]) / GIB:,.1f}", "bold")
    for s in worst[:SHOWN]:
        add(f"  stage {s}", lambda e, s=s: f"{peaks[e.label][s] / GIB:,.1f}", "dim")
    first = worst[0]
    add(f"stage {first}, GiB a part", lambda _: "", "dim")
    add("  held in flight", lambda e: f"{e.stages[first].held / GIB:,.2f}", "dim")
    add("  kept to the end", lambda e: f"{e.stages[first].kept / GIB:,.2f}", "dim")
    return table


def _figures(plan: PipelinePlan, hardware: Hardware, seconds: float) -> dict[str, Any]:
    return {
        "setup": asdict(plan.setup),
        "pp": plan.pp,
        "micro_batch": plan.micro_batch,
        "parameters": list(plan.elements),
        "hardware": asdict(hardware),
        "estimates": [
            {
                "name": e.label,
                "stages": [asdict(stage) for stage in e.stages],
                "peak_bytes": plan.peaks(e),
                "seconds_of_a_step": asdict(plan.times(e, hardware)),
                "rate_per_gpu": plan.rate(e, hardware),
            }
            for e in plan.estimates
        ],
        "seconds": seconds,
    }
