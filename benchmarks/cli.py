"""The command line of the benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks import contenders, measure, plots, results_files, tables
from benchmarks.workloads import AXES, WORKLOADS, Workload, find
from dpshard.applications.cli import console
from dpshard.errors import ConfigurationError

app = typer.Typer(
    cls=console.OneLineErrors,
    help="Measure dpshard beside ordinary training and its peers. docs/benchmarks.md says how, and how to read it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Names = Annotated[list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="[dim]\\[default: W1 to W5][/]")]
One = Annotated[str, typer.Argument(metavar="WORKLOAD", help="W1 to W5.")]
Contenders = Annotated[
    list[str] | None,
    typer.Option(
        "--contender",
        "-c",
        metavar="NAME",
        help="nonprivate, dpshard:STYLE:MODE, opacus:hooks, opacus:ghost, vmap, jax:masked, jax:nonprivate; +compile "
        "behind the first two and vmap; or several at once: default, modes (every style and mode of dpshard), "
        "compiled. May be repeated. [dim]\\[default: default][/]",
    ),
]
Rounds = Annotated[int, typer.Option(min=2, help="Timed steps of each, in turns.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch; JAX takes all cores that it may use.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peaks, each in a fresh process.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of all contenders.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Tiny models: a test that everything works, without a figure.")]


@app.command()
def run(
    workloads: Names = None,
    contender: Contenders = None,
    rounds: Rounds = 20,
    threads: Threads = 2,
    memory: Memory = True,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Check, time and measure the memory of all contenders on some workloads; write JSON, tables and plots."""
    names = contenders.expand(contender or [])
    chosen = _workloads(workloads, tiny)
    settings = measure.Settings(rounds=rounds, threads=threads, memory=memory, device=device)
    with console.progress("measuring", len(chosen) * measure.steps_of(names, settings)) as advance, _quiet():
        for workload in chosen:
            figures = measure.measure(workload, names, settings, advance)
            results_files.write(out, workload.name, "workload", figures)
            _report(figures)
    report(out)


@app.command()
def sweep(
    workload: One,
    axis: Annotated[str, typer.Option(help=f"Size that grows: {', '.join(AXES)}.")],
    values: Annotated[str, typer.Option(metavar="N,N,...", help="Its sizes.")],
    contender: Contenders = None,
    rounds: Rounds = 20,
    threads: Threads = 2,
    memory: Memory = True,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure how costs grow with the length T, the micro-batch B, the width or the depth of a model."""
    names = contenders.expand(contender or ["dpshard:all-layer", "dpshard:layer-wise", "vmap"])
    try:
        sizes = [int(value) for value in values.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"values={values!r}: write whole numbers with commas between, such as 64,128."
        ) from None
    base = find(workload, tiny=tiny)
    grown = [base.resized(axis, size) for size in sizes]
    settings = measure.Settings(rounds=rounds, threads=threads, memory=memory, device=device)
    with console.progress("measuring", len(grown) * measure.steps_of(names, settings)) as advance, _quiet():
        points = [measure.measure(w, names, settings, advance) for w in grown]
    figures = {"workload": points[0]["workload"], "axis": axis, "values": sizes, "points": points}
    results_files.write(out, f"sweep-{base.name}-{axis}", "sweep", figures)
    report(out)


@app.command("largest-batch")
def largest_batch(
    workload: One,
    memory: Annotated[float, typer.Option(metavar="GIB", min=0.01, help="The budget.")] = 1.0,
    contender: Contenders = None,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Search the largest physical batch of each contender with a step within a memory budget."""
    from benchmarks import largest

    names = contenders.expand(contender or [])
    base = find(workload, tiny=tiny)
    with console.err.status("searching ...") as status, _quiet():
        figures = largest.search(
            base, names, budget=int(memory * 2**30), threads=threads, device=device,
            report=lambda text: status.update(escape(text)),
        )  # fmt: skip
    results_files.write(out, f"largest-batch-{base.name}", "largest-batch", figures)
    report(out)


@app.command()
def zero(
    workloads: Names = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes; on GPUs one each.")] = 2,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="ddp, zero1, fsdp2-kept, fsdp2, deepspeed-1, -2, -3; may be repeated."),
    ] = None,
    clipping: Annotated[
        list[str] | None, typer.Option(metavar="STYLE[:MODE]", help="May be repeated. [dim]\\[default: both styles][/]")
    ] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of forward and backward.")] = "fp32",
    compiled: Annotated[bool, typer.Option("--compiled", help="Compile every block of every variant.")] = False,
    rounds: Rounds = 10,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Compare private with ordinary training in throughput and memory, by ZeRO stage (Figures 5 and 7 of DP-ZeRO).

    On GPUs: python -m benchmarks zero G1 G2 G3 --ranks 1 --stage fsdp2 --precision bf16 --device cuda
    """
    from benchmarks import zero as sharded

    chosen = _workloads(workloads or ["W1", "W2"], tiny)
    setting = sharded.Setting(
        ranks=ranks, precision=precision, compiled=compiled, rounds=rounds, device=device, tiny=tiny
    )
    stages = stage or list(sharded.STAGES)
    clippings = clipping or ["all-layer", "layer-wise"]
    with console.progress("measuring", sharded.launches(chosen, stages, clippings)) as advance:
        for workload in chosen:
            figures = sharded.measure(workload, stages, clippings, setting, advance)
            results_files.write(out, f"zero-{workload.name}", "zero", figures)
    report(out)


@app.command()
def parallelisms(out: Out = results_files.FOLDER, tiny: Tiny = False) -> None:
    """Train under every kind and pair of parallelism on 1 to 8 gloo ranks, and count bytes on 256 that send nothing.

    The results of benchmarks/results become the tables of docs/model-parallel.md. With --tiny, only bytes are counted.
    """
    from benchmarks import parallelisms as part

    counted = part.traffic()
    console.out.print(part.traffic_table(counted), highlight=False, markup=False, soft_wrap=True)
    if tiny:
        return
    with console.progress("training", len(part.ROWS)) as advance:
        rows = part.measure(advance)
    console.out.print(part.error_table(rows), highlight=False, markup=False, soft_wrap=True)
    results_files.write(out, "parallelisms", "parallelisms", {"rows": rows, "traffic": counted})
    if out.resolve() == results_files.FOLDER:
        (figures,) = results_files.read(out, "parallelisms")
        part.PAGE.write_text(part.page(part.PAGE.read_text("utf-8"), figures), "utf-8")


@app.command()
def megatron(out: Out = results_files.FOLDER, tiny: Tiny = False) -> None:
    """Plan the runs of Megatron-LM's table of ordinary training, in minutes on one core, beside their speeds.

    The results of benchmarks/results become a table of docs/planning.md. With --tiny, only the first run is planned.
    """
    from benchmarks import megatron as part

    chosen = part.ROWS[:1] if tiny else part.ROWS
    with console.progress("planning", len(chosen)) as advance:
        rows = part.measure(chosen, advance)
    console.out.print(part.table(rows), highlight=False, markup=False, soft_wrap=True)
    if tiny:
        return
    results_files.write(out, "megatron", "megatron", {"rows": rows})
    if out.resolve() == results_files.FOLDER:
        (figures,) = results_files.read(out, "megatron")
        part.PAGE.write_text(part.page(part.PAGE.read_text("utf-8"), figures), "utf-8")


@app.command()
def gpu(
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="May be repeated; `--list` shows them. [dim]\\[default: all][/]"),
    ] = None,
    device: Device = "cuda",
    out: Out = results_files.ROOT / "benchmarks/results-gpu",
    tiny: Tiny = False,
    show: Annotated[bool, typer.Option("--list", help="Show the parts, and run none.")] = False,
    minutes: Annotated[
        float, typer.Option(help="Begin no part that might not end by then.", show_default="no limit")
    ] = float("inf"),
) -> None:
    """Measure large models on one GPU, in parts that resume: ordinary, dpshard eager and compiled, and peers."""
    from benchmarks import gpu as on_gpu

    parts = on_gpu.find(part or [])
    if show:
        for one in parts:
            console.out.print(f"{one.name}, {one.minutes:g} minutes: {' '.join(one.command)}", highlight=False)
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("torch finds no GPU: `dpshard doctor` says why. --device cpu --tiny tries it out.")
    if device == "cpu" or tiny:
        out = out / f"{device}{'-tiny' if tiny else ''}"  # a trial must not stand for a measurement
    failures = on_gpu.run(
        [on_gpu.SELF_TEST, *parts],
        out.resolve(),
        device=device,
        tiny=tiny,
        say=lambda text: console.err.print(escape(text)),
        minutes=minutes,
    )
    path = on_gpu.write(out, failures, device)
    console.out.print(path.read_text("utf-8"), markup=False, highlight=False)
    raise typer.Exit(1 if failures else 0)


@app.command()
def kernels(
    device: Device = "cuda", out: Out = results_files.ROOT / "benchmarks/results-gpu/kernels", tiny: Tiny = False
) -> None:
    """Run the self-tests of the Triton kernels on a GPU, as a part of `gpu`; `--tiny` changes nothing."""
    from benchmarks import kernels as part

    path = results_files.write(out, "kernels", "kernels", {"outcomes": part.outcomes(torch.device(device))})
    console.out.print(part.line(results_files.read(path.parent, "kernels")), markup=False, highlight=False)


@app.command()
def profile(
    workloads: Names = None,
    contender: Annotated[str, typer.Option("--contender", "-c", metavar="NAME")] = "dpshard:all-layer",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are profiled.")] = 5,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure the time of a step by groups of operators, beside the ordinary step."""
    from benchmarks import profiling

    contenders.expand([contender])
    torch.set_num_threads(threads)
    chosen = _workloads(workloads, tiny)
    with console.progress("measuring", len(chosen)) as advance, _quiet():
        profiles = []
        for workload in chosen:
            profiles.append(profiling.measure(workload, contender, steps=steps, device=device))
            advance(workload.name)
    results_files.write(out, "profile", "profile", {"contender": contender, "threads": threads, "workloads": profiles})
    report(out)


@app.command()
def data(
    workloads: Names = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed.")] = 5,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure the cost of drawing logical batches of up to millions of samples, and how long steps wait for them."""
    from benchmarks import data as loading

    torch.set_num_threads(threads)
    chosen = _workloads(workloads, tiny)
    with console.progress("measuring", len(chosen) + 1) as advance:
        drawn = loading.draws(loading.SIZES[:1] if tiny else loading.SIZES)
        advance("drawn")
        waits = _by_name(chosen, lambda workload: loading.waiting(workload, steps=steps, device=device), advance)
    results_files.write(out, "data", "data", {"draws": drawn, "waiting": waits, "threads": threads})
    report(out)


@app.command()
def verification(
    workloads: Names = None,
    steps: Annotated[int, typer.Option(min=20, help="Steps that are timed; those of 1, 2, 4, ... are verified.")] = 70,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure the time that verification adds to 1,000 steps."""
    from benchmarks import verification as verifying

    torch.set_num_threads(threads)
    chosen = _workloads(workloads, tiny)
    with console.progress("measuring", len(chosen)) as advance:
        costs = _by_name(chosen, lambda workload: verifying.measure(workload, steps=steps, device=device), advance)
    results_files.write(out, "verification", "verification", {"costs": costs, "threads": threads})
    report(out)


@app.command()
def packed(
    steps: Annotated[int, typer.Option(min=4, help="Steps of each; those of 0, 1, 2, 4, ... are not timed.")] = 8,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure tokens of text a second in packed and in padded rows, private and ordinary, on one thread."""
    from benchmarks import packed as packing

    torch.set_num_threads(1)
    size = packing.TINY if tiny else packing.Size()
    with console.progress("measuring", 4 * steps) as advance:
        figures = packing.measure(size, steps=steps, on_step=lambda: advance("step"))
    results_files.write(out, "packed", "packed", figures)
    report(out)


@app.command()
def units(
    rounds: Rounds = 10,
    memory: Memory = True,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure time and memory of units of 1, 4 and 16 rows over ordinary training on as many rows, on one thread."""
    from benchmarks import units as of_rows

    torch.set_num_threads(1)
    with console.progress("measuring", len(of_rows.MODELS) * len(of_rows.SIZES)) as advance, _quiet():
        rows = of_rows.measure(rounds=rounds, memory=memory, tiny=tiny, on_step=advance)
    results_files.write(out, "units", "units", {"rows": rows, "rounds": rounds, "samples": of_rows.ROWS})
    report(out)


@app.command()
def tokens(
    gib: Annotated[float, typer.Option(help="GiB of tokens in the store, all read in random order.")] = 2.0,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure random reads of a TokenStore, in one process and by two loaders: 2 GiB are a step of VaultGemma's."""
    from benchmarks.tokens import measure as read_all

    with console.err.status("reading ..."):
        figures = read_all(0.001, rounds=1) if tiny else read_all(gib)
    results_files.write(out, "tokens", "tokens", figures)
    report(out)


@app.command()
def noise(threads: Threads = 2, out: Out = results_files.FOLDER, tiny: Tiny = False) -> None:
    """Measure the cost of every kind of noise on the CPU."""
    from benchmarks import noise as kinds

    torch.set_num_threads(threads)
    with console.err.status("drawing ..."):
        figures = kinds.measure(2**12) if tiny else kinds.measure()
    results_files.write(out, "noise", "noise", {"kinds": figures})
    report(out)


@app.command()
def correlated(
    train: Annotated[
        bool, typer.Option("--train", help="Train digits and a language model: a quarter of an hour of one core.")
    ] = False,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure the time of a release with correlated noise, or compare trainings with it and without it (--train)."""
    if train:
        _train_correlated(out, tiny)
        return
    from benchmarks import correlated as part

    times = part.seconds(2**12 if tiny else part.ELEMENTS)
    for row in times:
        console.out.print(f"p = {row['vectors']:>2}: {row['ns']:.2f} ns/element")
    buffered = part.of_buffers(2**12 if tiny else part.ELEMENTS)
    for row in buffered:
        console.out.print(f"b = {row['bands']:>2}, from buffers: {row['ns']:.2f} ns/element")
    results_files.write(out, "correlated", "correlated", {"times": times, "buffered": buffered})


def _train_correlated(out: Path, tiny: bool) -> None:
    from benchmarks import correlated_training as training

    torch.set_num_threads(1)
    rows = []
    with console.progress("training", training.runs(tiny=tiny)) as advance, _quiet():
        for row in training.compare(advance, tiny=tiny):
            rows.append(row)  # written at once: an interrupted run leaves what it has found
            results_files.write(out, "correlated-training", "correlated-training", {"rows": rows})
            console.out.print(
                f"{row['task']}, epsilon {row['epsilon']:g}, {row['epochs']} epochs, {row['mechanism']}: error "
                f"{row['error']:.3f}, score {row['mean']:.3f} ± {row['deviation']:.3f} at {row['learning_rate']:g}"
            )
    report(out)


@app.command()
def factorisations(out: Out = results_files.FOLDER) -> None:
    """Hold sensitivity and error of correlated noise against jax-privacy, which must be installed."""
    from benchmarks import factorisations as part

    rows = []
    for row in part.compare():
        rows.append(row)
        differ = ", ".join(f"{name} differs by {value:.1e}" for name, value in row["differences"].items())
        console.out.print(f"{row['strategy']}, T = {row['steps']}, {row['bands']} bands, {row['separation']}: {differ}")
    results_files.write(out, "factorisations", "factorisations", {"versions": part.versions(), "cases": rows})


@app.command("fixed-cost")
def fixed_cost(
    blocks: Annotated[list[int] | None, typer.Argument(min=1, help="Equal blocks. [dim]\\[default: 24][/]")] = None,
    program: Annotated[
        list[str] | None, typer.Option("--program", "-p", help="eager, whole, blocks; may be repeated.")
    ] = None,
    style: Annotated[
        list[str] | None, typer.Option("--style", "-s", help="all-layer, layer-wise, block-wise; may be repeated.")
    ] = None,
    rounds: Rounds = 20,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Measure what a private step costs where arithmetic is nothing: equal blocks of width 32, on one thread."""
    from benchmarks import fixed_cost as fixed

    programs, styles = program or list(fixed.PROGRAMS), style or list(fixed.STYLES)
    depths = [2] if tiny else blocks or [24]
    with console.progress("measuring", len(depths) * fixed.steps_of(programs, styles, rounds)) as advance, _quiet():
        found = [
            fixed.measure(n, programs, styles, rounds=rounds, width=8 if tiny else 32, on_step=advance) for n in depths
        ]
    results_files.write(out, "fixed-cost", "fixed-cost", {"depths": found})
    console.out.print(tables.fixed_cost({"depths": found}), highlight=False, markup=False, soft_wrap=True)
    report(out)


@app.command()
def advice(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[DATA]...", help="digits, breast_cancer, pydoc. \\[default: all]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender; a seed is a split and a start.")] = 5,
    threads: Threads = 1,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Compare the advice of `dpshard advise` with the README's first guess on small data sets, in turns.

    Figures of other data sets stay in the file.
    """
    from benchmarks import advice as advising
    from benchmarks.advice_language import PYDOC

    torch.set_num_threads(threads)
    contests = advising.CONTESTS | {"pydoc": PYDOC}
    if unknown := set(names or ()) - contests.keys():
        raise ConfigurationError(f"DATA={sorted(unknown)}: choose from {list(contests)}.")
    chosen = {name: contests[name] for name in (["breast_cancer"] if tiny else names or contests)}
    before = next((found["data"] for found in results_files.read(out, "advice")), {}) if names else {}
    runs = seeds * sum(len(contest.contenders) for contest in chosen.values())
    with console.progress("training", runs) as advance, _quiet():
        figures = advising.compare(chosen, seeds, advance, before)
    results_files.write(out, "advice", "advice", figures)
    for name, contenders_ in figures["data"].items():
        for contender, scores in contenders_.items():
            console.out.print(f"{name}, {contender}: {scores['mean']:.4g} ± {scores['deviation']:.2g}")


@app.command("advice-sweep")
def advice_sweep(
    task: Annotated[Literal["tabular", "language"], typer.Option(help="Synthetic tables, or texts.")] = "tabular",
    threads: Threads = 1,
    out: Out = results_files.FOLDER,
    tiny: Tiny = False,
) -> None:
    """Sweep optimizers, learning rates and lengths on data of no comparison: what the advice stands on."""
    from benchmarks import advice as tables_
    from benchmarks import advice_language as texts

    torch.set_num_threads(threads)
    sweep = tables_ if task == "tabular" else texts
    with console.progress("training", sweep.runs_of_the_sweep(tiny=tiny)) as advance, _quiet():
        runs = sweep.sweep(advance, tiny=tiny)
    name = "advice-sweep" if task == "tabular" else "advice-sweep-language"
    results_files.write(out, name, "advice-sweep", {"runs": runs})
    for row in sweep.summary(runs):
        console.out.print(row)


@app.command()
def report(out: Out = results_files.FOLDER) -> None:
    """Write tables and plots again from the JSON files; those of benchmarks/results also into docs/benchmarks.md."""
    try:
        drawn = plots.draw(out)
    except ConfigurationError as error:  # no matplotlib; the figures took an hour, and tables need none
        console.err.print(escape(str(error)))
        drawn = []
    for path in [*drawn, *tables.write(out)]:
        console.err.print(f"wrote {path}", style="dim")


def _workloads(names: list[str] | None, tiny: bool) -> list[Workload]:
    return [find(name, tiny=tiny) for name in names or WORKLOADS]


def _by_name(
    workloads: Iterable[Workload], measured: Callable[[Workload], dict[str, float]], advance: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    found = {}
    for workload in workloads:
        found[workload.name] = measured(workload)
        advance(workload.name)
    return found


def _report(figures: dict[str, object]) -> None:
    wide = Console(width=max(110, console.out.width), highlight=False)  # not cut off without a terminal
    wide.print(tables.rich_table(figures))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of peers; an error stays visible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
