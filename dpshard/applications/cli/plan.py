"""`dpshard plan`: the cost of a private step on many ranks, counted on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from dpshard.applications.cli import console, plots
from dpshard.applications.cli.run_folder import write_json
from dpshard.config import CLIPPING_MODES, ClippingStyle, check_choice

if TYPE_CHECKING:
    from dpshard.applications.planner import Estimate, Plan

GIB = 2**30


Model = Annotated[
    str,
    typer.Option(
        help="gpt2-xl, gpt-26b, gpt-100b, vit-g, vit-10b, vaultgemma-1b, or hf:NAME_OR_PATH, a transformers "
        "configuration (name, folder, or config.json)."
    ),
]
Shard = Annotated[
    Literal["ddp", "zero2", "fsdp2", "hsdp"],
    typer.Option(
        help="ddp: no shards (stage 0); zero2: FSDP2 that keeps parameters gathered until backward; "
        "fsdp2: shards of everything (stage 3); hsdp: shards within a node, replicated over nodes."
    ),
]
Length = Annotated[
    int | None, typer.Option(help="Tokens of a sample (pixels along a side). [dim]\\[default: the model's][/]")
]
Clippings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STYLE[:MODE]",
        help="all-layer, block-wise, layer-wise or param-wise, with a clipping mode (mixed-ghost: two passes); "
        "may be repeated. [dim]\\[default: several][/]",
    ),
]


def command(
    model: Model = "gpt-100b",
    ranks: Annotated[int, typer.Option(help="Number of GPUs.")] = 256,
    shard: Shard = "fsdp2",
    node: Annotated[int, typer.Option(help="GPUs of a node, the shards of hsdp.")] = 8,
    micro_batch: Annotated[int, typer.Option(help="Samples of a rank in one forward.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a rank in one step.")] = 1,
    seq: Length = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Recompute activations in backward.")
    ] = False,
    precision: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Of forward and backward; reduction and update are float32.")
    ] = "bf16",
    optimizer: Annotated[Literal["adamw", "sgd"], typer.Option(help="Optimizer with its states.")] = "adamw",
    clipping: Clippings = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of a GPU: adds the styles that fit, and the largest micro-batches.")
    ] = None,
    as_json: console.JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw memory and FLOPs.")] = None,
) -> None:
    """Count collectives, FLOPs and peak memory of a private step on many GPUs, on one core.

    The real step runs on tensors without values. Only the lines "By formula" are estimates.

    For example: dpshard plan --model gpt-100b --ranks 256 --micro-batch 1 --checkpointing
    --gpu-memory 80
    """
    chosen = [parse_clipping(text) for text in clipping or ()]
    with console.err.status("loading ...") as status:
        from dpshard.applications.planner import DEFAULT_CLIPPINGS, Clipping, Setup, make_plan
        from dpshard.applications.planner.advice import advise

        setup = Setup(
            model=model, ranks=ranks, shard=shard, node=node, micro_batches=micro_batches, seq=seq,
            checkpointing=checkpointing, precision=precision, optimizer=optimizer,
        )  # fmt: skip

        def report(what: str) -> None:
            status.update(f"{what} ...")
            if not console.err.is_terminal:
                console.err.print(f"{what} ...")

        begun = time.monotonic()
        plan = make_plan(
            setup,
            micro_batch=micro_batch,
            clippings=[Clipping(style, mode) for style, mode in chosen] or DEFAULT_CLIPPINGS,
            gpu_memory=gpu_memory,
            report=report,
        )
        seconds = time.monotonic() - begun
        advice = advise(plan)
    if as_json is not None:
        write_json(as_json, _figures(plan, advice, seconds), public=True)
    if plot is not None:
        draw(plan, plot)
    _print(plan, advice, seconds)


def parse_clipping(text: str) -> tuple[str, str]:
    """Return style and mode of `STYLE[:MODE]`; raise ConfigurationError for unknown ones."""
    style, _, mode = text.partition(":")
    check_choice("clipping", style, get_args(ClippingStyle))
    check_choice("clipping mode", mode or "auto", sorted(CLIPPING_MODES))
    return style, mode or "auto"


def _print(plan: Plan, advice: Sequence[str], seconds: float) -> None:
    from dpshard.applications.planner.meter import PARTS

    setup = plan.setup
    precision = "bfloat16, reduced in float32" if setup.precision == "bf16" else "float32"
    again = "activations computed again" if setup.checkpointing else "activations kept"
    console.out.print(
        f"[bold]{escape(str(setup.model))}[/], {plan.parameters / 1e9:,.1f} billion parameters, on {setup.ranks} ranks "
        f"({setup.shard}), {setup.micro_batches} x {plan.micro_batch} samples per rank and step, {precision}, {again}"
    )
    table = Table(
        title="A step of one rank",
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    for estimate in plan.estimates:
        table.add_column(estimate.label.replace(", ", "\n"), justify="right")

    def add(name: str, values: Callable[[Estimate], str], style: str = "") -> None:
        table.add_row(name, *map(values, plan.estimates), style=style)

    add("TFLOP", lambda estimate: f"{estimate.flops / 1e12:,.1f}")
    add("peak GiB", lambda estimate: f"{estimate.peak / GIB:,.1f}", "bold")
    for part in PARTS:
        add(f"  {part}", lambda estimate, part=part: f"{estimate.parts[part] / GIB:,.1f}", "dim")
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        if any(estimate.sent(kind).nbytes > 1024 for estimate in plan.estimates):
            add(f"{kind} GiB", lambda estimate, kind=kind: f"{estimate.sent(kind).nbytes / GIB:,.1f}")
            add("  calls", lambda estimate, kind=kind: f"{estimate.sent(kind).calls:,}", "dim")
    if plan.gpu_memory is not None:
        largest = f"max. micro-batch\n  in {plan.gpu_memory / GIB:g} GiB"
        add(largest, lambda e: f"{e.largest_micro_batch:,}" if e.largest_micro_batch else "none", "bold green")
    console.out.print(table)
    states = "; ".join(f"{stage} {size / GIB:,.1f}" for stage, size in plan.model_states.items())
    console.out.print(f"By formula, GiB per rank of parameters, gradients and Adam states: {states}.")
    for sentence in advice:
        console.out.print(f"• {escape(sentence)}")
    console.out.print(
        f"[dim]Counted in {seconds:.0f} s. Bytes are those of tensors: leave a tenth for allocator and libraries.[/]"
    )


def _figures(plan: Plan, advice: Sequence[str], seconds: float) -> dict[str, Any]:
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
        "model_states_bytes": plan.model_states,
        "advice": list(advice),
        "seconds": seconds,
    }


def draw(plan: Plan, path: Path) -> None:
    """Draw peak memory by part, and FLOPs, of every step."""
    from dpshard.applications.planner.meter import PARTS

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
