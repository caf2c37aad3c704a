"""`dpshard plan`, and its settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import typer

from dpshard.applications.cli import console
from dpshard.applications.cli.options import options_of
from dpshard.config import CLIPPING_MODES, ClippingStyle, require_choice
from dpshard.errors import ConfigurationError

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
        from dpshard.applications.cli import plan_pipeline, plan_table
        from dpshard.applications.planner import DEFAULT_CLIPPINGS, Clipping, Setup, make_plan
        from dpshard.applications.planner.hardware import Hardware
        from dpshard.applications.planner.pipelines import make_pipeline_plan
        from dpshard.applications.planner.run_cost import Run, run_costs

        def report(what: str) -> None:
            status.update(f"{what} ...")
            if not console.err.is_terminal:
                console.err.print(f"{what} ...")

        clippings = [Clipping(style, mode) for style, mode in chosen]
        setup, hardware = settings.of(Setup), settings.of(Hardware, latency=settings.latency * 1e-6)
        begun, how = time.monotonic(), dict[str, Any](micro_batch=settings.micro_batch, report=report)
        if settings.budget is not None:
            plan_table.print_frontier(settings.budget, settings.seq, hardware, as_json, report)
            return
        if settings.pp != 1:
            if plot is not None:
                raise ConfigurationError("--plot does not draw pipelines. Leave it out, or --pp.")
            pipeline = make_pipeline_plan(setup, pp=settings.pp, clippings=clippings or None, **how)
            plan_pipeline.show(pipeline, hardware, settings.gpu_memory, time.monotonic() - begun, as_json)
            return
        plan = make_plan(setup, clippings=clippings or DEFAULT_CLIPPINGS, gpu_memory=settings.gpu_memory, **how)
        seconds = time.monotonic() - begun
        report("composing the run")
        asked = None not in (settings.batch_size, settings.sample_size, settings.steps)
        costs = run_costs(plan, settings.of(Run), hardware) if asked else None
    plan_table.show(plan, hardware, costs, seconds, as_json, plot)


def parse_clipping(text: str) -> tuple[str, str]:
    """Parse `STYLE[:MODE]`, or raise ConfigurationError."""
    style, _, mode = text.partition(":")
    require_choice("clipping", style, get_args(ClippingStyle))
    require_choice("clipping mode", mode or "auto", sorted(CLIPPING_MODES))
    return style, mode or "auto"
