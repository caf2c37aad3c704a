"""`dpshard plan`, and its settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args

import typer
from rich.markup import escape

from dpshard.applications.cli import console, plan_pipeline, plan_time, plots
from dpshard.applications.cli.options import options_of
from dpshard.applications.cli.plan_time import GIB, RunCosts
from dpshard.applications.cli.run_folder import write_json
from dpshard.config import CLIPPING_MODES, ClippingStyle, require_choice
from dpshard.errors import ConfigurationError

if TYPE_CHECKING:
    from dpshard.applications.planner import Plan
    from dpshard.applications.planner.hardware import Hardware

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Settings of a plan; options.yaml says what each means."""

    model: str = "gpt-100b"
    micro_batch: int = 1
    micro_batches: int = 1
    seq: int | None = None
    checkpointing: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clipping: list[str] | None = field(default=None, metadata={"metavar": "STYLE[:MODE]"})

    ranks: int = 256
    shard: Literal["ddp", "zero2", "fsdp2", "hsdp"] = "fsdp2"
    node: int = 8
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpu_memory: float | None = None

    gpu: Literal["a100", "a100-40", "h100", "h200", "b200"] = "h100"
    mfu: float = 0.45
    intra: float = 450.0
    inter: float = 50.0
    pcie: float = 50.0
    latency: float = 20.0

    batch_size: int | None = None
    sample_size: int | None = None
    steps: int | None = None
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    target_delta: float = 1e-5
    budget: str | None = field(default=None, metadata={"metavar": "epsilon=E,delta=D,gpu-hours=H,dataset=N"})

    def __post_init__(self) -> None:
        run = (self.batch_size, self.sample_size, self.steps)
        if any(run) and not all(run):
            raise ConfigurationError("A run needs --batch-size, --sample-size and --steps. Give all three, or none.")
        if all(run) and (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError("A run needs either --target-epsilon or --noise-multiplier.")
        if self.pp != 1 and any(run):
            raise ConfigurationError("A whole run is not planned with --pp. Leave --batch-size and the others out.")

    def of(self, kind: type[T], **others: Any) -> T:
        """Return a dataclass of the planner with these settings, except for `others`."""
        names = [field.name for field in fields(cast(Any, kind)) if field.name not in others]
        return kind(**{name: getattr(self, name) for name in names}, **others)


@options_of(PlanSettings, "plan")
def command(
    as_json: console.JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw memory and FLOPs.")] = None,
    **flags: Any,
) -> None:
    """Count collectives, FLOPs and peak memory of a private step on many GPUs, on one core.

    The real step runs on tensors without values. Times are estimates, and so are the lines "By formula".

    For example: dpshard plan --model gpt-100b --ranks 256 --micro-batch 1 --checkpointing --gpu-memory 80
    """
    settings = PlanSettings(**{name: value for name, value in flags.items() if value is not None})
    chosen = [parse_clipping(text) for text in settings.clipping or ()]
    with console.err.status("loading ...") as status:
        from dpshard.applications.planner import DEFAULT_CLIPPINGS, Clipping, Setup, make_plan
        from dpshard.applications.planner.advice import advise
        from dpshard.applications.planner.hardware import Hardware
        from dpshard.applications.planner.pipelines import make_pipeline_plan
        from dpshard.applications.planner.run_cost import Run

        def report(what: str) -> None:
            status.update(f"{what} ...")
            if not console.err.is_terminal:
                console.err.print(f"{what} ...")

        clippings = [Clipping(style, mode) for style, mode in chosen]
        setup, hardware = settings.of(Setup), settings.of(Hardware, latency=settings.latency * 1e-6)
        begun, how = time.monotonic(), dict[str, Any](micro_batch=settings.micro_batch, report=report)
        if settings.budget is not None:
            plan_time.print_frontier(settings.budget, settings.seq, hardware, as_json, report)
            return
        if settings.pp != 1:
            if plot is not None:
                raise ConfigurationError("--plot does not draw pipelines. Leave it out, or --pp.")
            staged: Any = {"pp": settings.pp, "clippings": clippings or None}
            pipeline = make_pipeline_plan(setup, **staged, **how)
            plan_pipeline.show(pipeline, hardware, settings.gpu_memory, time.monotonic() - begun, as_json)
            return
        whole: Any = {"clippings": clippings or DEFAULT_CLIPPINGS, "gpu_memory": settings.gpu_memory}
        plan = make_plan(setup, **whole, **how)
        seconds = time.monotonic() - begun
        report("composing the run")
        asked = None not in (settings.batch_size, settings.sample_size, settings.steps)
        costs = plan_time.run_costs(plan, settings.of(Run), hardware) if asked else None
    advice = [*advise(plan), *plan_time.advice(plan, hardware)]
    if as_json is not None:
        figures = _figures(plan, advice, seconds) | plan_time.figures(plan, hardware, costs)
        write_json(as_json, figures, public=True)
    if plot is not None:
        draw(plan, plot)
    _print(plan, hardware, costs, advice, seconds)


def parse_clipping(text: str) -> tuple[str, str]:
    """Parse `STYLE[:MODE]`, or raise ConfigurationError."""
    style, _, mode = text.partition(":")
    require_choice("clipping", style, get_args(ClippingStyle))
    require_choice("clipping mode", mode or "auto", sorted(CLIPPING_MODES))
    return style, mode or "auto"


def _print(plan: Plan, hardware: Hardware, costs: RunCosts | None, advice: Sequence[str], seconds: float) -> None:
    from dpshard.applications.planner.counts import PARTS
    from dpshard.applications.planner.estimates import zero_model_states

    setup = plan.setup
    precision = "bfloat16, reduced in float32" if setup.precision == "bf16" else "float32"
    shard = setup.shard + "".join(f", {n} {size}" for n, size in (("tp", setup.tp), ("cp", setup.cp)) if size > 1)
    again = "activations computed again" if setup.checkpointing else "activations kept"
    console.out.print(
        f"[bold]{escape(str(setup.model))}[/], {plan.parameters / 1e9:,.1f} billion parameters, on {setup.ranks} ranks "
        f"({shard}), {setup.micro_batches} x {plan.micro_batch} samples per rank and step, {precision}, {again}"
    )
    table, add = plan_time.new_table("A step of one rank", plan.estimates)
    add("TFLOP", lambda estimate: f"{estimate.flops / 1e12:,.1f}")
    add("peak GiB", lambda estimate: f"{estimate.peak / GIB:,.1f}", "bold")
    for part in PARTS:
        add(f"  {part}", lambda estimate, part=part: f"{estimate.parts[part] / GIB:,.1f}", "dim")
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        if any(estimate.sent(kind).nbytes > 1024 for estimate in plan.estimates):
            add(f"{kind} GiB", lambda estimate, kind=kind: f"{estimate.sent(kind).nbytes / GIB:,.1f}")
            add("  calls", lambda estimate, kind=kind: f"{estimate.sent(kind).calls:,}", "dim")
    add("host GiB, if records\n  are offloaded", lambda estimate: f"{plan_time.offloaded(plan, estimate):,.1f}", "dim")
    plan_time.add_rows(plan, hardware, add)
    if plan.gpu_memory is not None:
        largest = f"max. micro-batch\n  in {plan.gpu_memory / GIB:g} GiB"
        add(largest, lambda e: f"{e.largest_micro_batch:,}" if e.largest_micro_batch else "none", "bold green")
        plan_time.add_rates(plan, hardware, add)
    console.out.print(table)
    console.out.print(f"[dim]{plan_time.assumptions(hardware)}[/]")
    if costs is not None:
        plan_time.print_run(plan, costs)
    states = "; ".join(
        f"{stage} {size / GIB:,.1f}" for stage, size in zero_model_states(plan.parameters, setup.ranks).items()
    )
    console.out.print(f"By formula, GiB per rank of parameters, gradients and Adam states: {states}.")
    for sentence in advice:
        console.out.print(f"• {escape(sentence)}")
    console.out.print(
        f"[dim]Counted in {seconds:.0f} s. Bytes are those of tensors: leave a tenth for allocator and libraries.[/]"
    )


def _figures(plan: Plan, advice: Sequence[str], seconds: float) -> dict[str, Any]:
    from dpshard.applications.planner.estimates import zero_model_states

    def collectives(estimate: Any) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "dtype": dtype, "calls": traffic.calls, "bytes": traffic.nbytes}
            for (kind, dtype), traffic in estimate.traffic.items()
        ]

    return {
        "setup": asdict(plan.setup),
        "micro_batch": plan.micro_batch,
        "parameters": plan.parameters,
        "gpu_memory_bytes": plan.gpu_memory,
        "estimates": [
            {
                "name": estimate.label,
                "clipping": None if estimate.clipping is None else asdict(estimate.clipping),
                "flops": estimate.flops,
                "peak_bytes": estimate.peak,
                "parts_bytes": estimate.parts,
                "collectives": collectives(estimate),
                "largest_micro_batch": estimate.largest_micro_batch,
            }
            for estimate in plan.estimates
        ],
        "model_states_bytes": zero_model_states(plan.parameters, plan.setup.ranks),
        "advice": list(advice),
        "seconds": seconds,
    }


def draw(plan: Plan, path: Path) -> None:
    """Draw memory and FLOPs."""
    from dpshard.applications.planner.counts import PARTS

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
