"""`dpshard bench`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dpshard.applications.cli import console
from dpshard.applications.cli.options import described
from dpshard.applications.cli.plan import parse_clipping
from dpshard.applications.cli.run_folder import write_json
from dpshard.config import require_positive

if TYPE_CHECKING:
    from dpshard.applications.benchmark import Comparison, Measured

MIB = 2**20


@described(
    "bench",
    clipping={"metavar": "STYLE[:MODE]"},
    rounds={"min": 2},
    memory={"names": ["--memory/--no-memory"]},
    threads={"min": 1},
)
def command(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function without arguments that returns (model, x, y, loss_fn): a new model, one micro-batch of "
            "inputs and targets (tensors, or tuples or dicts of them), and loss_fn(model(x), y), its mean loss.",
        ),
    ],
    clipping: list[str] | None = None,
    rounds: int = 20,
    compile: bool = False,
    memory: bool = True,
    threads: int | None = None,
    as_json: console.JsonFile = None,
) -> None:
    """Measure time, memory and FLOPs of private training for your model, and compare with ordinary training.

    Steps take turns, so other load slows all of them alike.

    For example: dpshard bench my_project.bench:subject --clipping all-layer --clipping layer-wise
    """
    chosen = [parse_clipping(text) for text in clipping or ()]
    if threads is not None:
        require_positive("threads", threads)
    with console.err.status("loading ..."):
        import torch

        from dpshard.applications.benchmark import compare
        from dpshard.applications.benchmark.comparison import DEFAULT_CLIPPINGS, advise, steps_of

    if threads is not None:
        torch.set_num_threads(threads)
    clippings = list(dict.fromkeys(chosen)) or list(DEFAULT_CLIPPINGS)
    how: Any = {"compiled": compile, "memory": memory}
    with console.progress("measuring", steps_of(clippings, rounds, **how)) as advance:
        comparison = compare(subject, clippings=clippings, rounds=rounds, on_step=advance, **how)
    advice = advise(comparison)
    if as_json is not None:
        write_json(as_json, _figures(comparison, advice), public=True)
    _print(comparison, advice)


def _print(comparison: Comparison, advice: list[str]) -> None:
    first = comparison.measured[0]
    console.out.print(
        f"A step on {comparison.rows} samples, {comparison.parameters:,} trained parameters, on {comparison.device}; "
        f"{first.seconds.count} rounds"
    )
    table = console.plain_table(columns=("", "ms", "time", "quartiles", "MiB", "memory", "FLOPs"), no_wrap=True)
    for m in comparison.measured:
        table.add_row(*_row(comparison, m), style="dim" if m.variant.clipping is None else "")
    console.out.print(table)
    for sentence in advice:
        console.out.print(f"• {escape(sentence)}")
    console.out.print("[dim]Columns time, memory and FLOPs: times those of the ordinary step of the same kind.[/]")


def _row(comparison: Comparison, m: Measured) -> list[str]:
    base = comparison.baseline(m)
    ratio, peak = m.ratio, "" if m.peak is None else f"{m.peak / MIB:,.0f}"
    memory = f"{m.peak / base.peak:.2f}" if m.peak and base.peak else ""
    flops = f"{m.flops / base.flops:.2f}" if base.flops else ""
    return [
        escape(m.variant.label), f"{1e3 * m.seconds.median:,.1f}", f"{ratio.median:.2f}",
        f"{ratio.low:.2f}–{ratio.high:.2f}", peak, memory, flops,
    ]  # fmt: skip


def _figures(comparison: Comparison, advice: list[str]) -> dict[str, Any]:
    return {
        "rows": comparison.rows,
        "parameters": comparison.parameters,
        "device": comparison.device,
        "measured": [
            {
                "label": m.variant.label,
                "clipping": m.variant.clipping,
                "compiled": m.variant.compiled,
                "seconds": asdict(m.seconds),
                "ratio": asdict(m.ratio),
                "flops": m.flops,
                "peak_bytes": m.peak,
            }
            for m in comparison.measured
        ],
        "advice": advice,
    }
