"""Results as tables: on the screen, in benchmarks/results/README.md, and between the marks of docs/benchmarks.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks import results_files
from benchmarks.contenders import BASELINE
from dpshard.applications.cli.run_folder import write_atomically

PAGE = results_files.ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
MIB = 2**20

Figures = Mapping[str, Any]
HEAD = ("contender", "ms", "time", "quartiles", "memory", "FLOPs", "above the floor")


def rows(result: Figures) -> list[list[str]]:
    """Return the cells of a workload's table, a row per timed contender."""
    found = []
    for c in result["contenders"]:
        if "error" in c:
            continue
        ratio = c["ratio"]
        found.append(
            [
                c["name"],
                f"{1e3 * c['seconds']['median']:,.1f}",
                f"{ratio['median']:.2f}",
                f"{ratio['low']:.2f}–{ratio['high']:.2f}",
                _cell(ratio_at(result, c["name"], "peak_bytes")),
                _cell(ratio_at(result, c["name"], "flops")),
                "" if not c.get("update_error") else f"{ratio['median'] / result['floor']['ratio']:.2f}",
            ]
        )
        if "own_ratio" in c:
            found[-1][2] += f" ({c['own_ratio']['median']:.2f})"
    return found


def _cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def refusals(result: Figures) -> list[str]:
    """Return one sentence per contender that was not timed."""
    return [f"{c['name']} was not timed: {c['error']}" for c in result["contenders"] if "error" in c]


def rich_table(result: Figures) -> Table:
    """Return a workload's table for the terminal."""
    title = f"{result['workload']['name']}, {result['workload']['title']}: {result['rows']} samples per step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name in HEAD:
        table.add_column(name, justify="left" if name == HEAD[0] else "right", no_wrap=True)
    for cells in rows(result):
        table.add_row(*map(escape, cells))
    table.caption = escape("\n".join([_floor(result), *refusals(result)]))
    table.caption_justify = "left"
    return table


def write(folder: Path) -> list[Path]:
    """Write README.md in `folder`; for the repository's own folder, also docs/benchmarks.md."""
    path = folder / "README.md"
    write_atomically(path, f"# Results\n\n{text(folder, folder)}\n".encode())
    if folder.resolve() != results_files.FOLDER:
        return [path]
    write_atomically(PAGE, page(PAGE.read_text("utf-8")).encode())
    return [path, PAGE]


def page(before: str) -> str:
    """Return docs/benchmarks.md with the current tables."""
    head, _, rest = before.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{text(results_files.FOLDER, PAGE.parent)}\n\n{END}{tail}"


def text(folder: Path, seen_from: Path) -> str:
    """Return all results of `folder` as Markdown; pictures are linked as from a page in `seen_from`."""
    parts = [part(result) for kind, part in _PARTS.items() for result in results_files.read(folder, kind)]
    if not parts:
        return "No results yet: `make bench` writes them."
    prefix = Path(os.path.relpath(folder, seen_from))
    pictures = [f"![{p.stem}]({(prefix / p.name).as_posix()})" for p in sorted(folder.glob("*.png"))]
    return "\n\n".join([*parts, *pictures])


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _workload(result: Figures) -> str:
    name = result["workload"]
    said = [f"### {name['name']}: {name['title']}", _setting(result), markdown(HEAD, rows(result)), _floor(result)]
    return "\n\n".join([*said, *(f"- {line}" for line in refusals(result))])


def _setting(result: Figures) -> str:
    settings, where = result["settings"], result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"{result['parameters']:,} parameters, {result['rows']} samples per step, {settings['dtype']}, "
        f"{settings['rounds']} rounds, {settings['threads']} threads on {where['gpu'] or where['cpu']} with "
        f"{where['cores']} cores, load {where['load']}; {where['date']}, commit {where['commit']}, {versions}."
    )


def _version(result: Figures) -> str:
    """Return the date and commit of a result, because one page may have figures of several days."""
    return f"Measured on {result['environment']['date']}, commit {result['environment']['commit']}."


def _floor(result: Figures) -> str:
    floor = result["floor"]
    return (
        f"Floor: {floor['ratio']:.2f} times the ordinary step, as clipping and noise need {floor['flops'] / 1e9:.2f} "
        f"GFLOP and {floor['bytes'] / MIB:,.0f} MiB more, at {floor['machine_flops'] / 1e9:,.0f} GFLOP/s and "
        f"{floor['machine_bandwidth'] / 1e9:,.1f} GB/s."
    )


def ratio_at(point: Figures, name: str, what: str = "ratio") -> float | None:
    """Return time, `peak_bytes` or `flops` of a contender over the baseline's; None if it was not measured there."""
    by_name = {c["name"]: c for c in point["contenders"]}
    c, base = by_name[name], by_name[BASELINE]
    if what == "ratio":
        return c["ratio"]["median"] if "ratio" in c else None
    return c[what] / base[what] if c.get(what) and base.get(what) else None


def _sweep(result: Figures) -> str:
    points, axis = result["points"], result["axis"]
    body = [
        [f"{c['name']}, {label}", *(_cell(ratio_at(point, c["name"], what)) for point in points)]
        for what, label in (("ratio", "time"), ("peak_bytes", "memory"))
        for c in points[0]["contenders"]
        if c["name"] != BASELINE
    ]
    head = [f"over the ordinary step, {axis} =", *map(str, result["values"])]
    return f"### {result['workload']['name']}, {axis} grows\n\n{_version(result)}\n\n{markdown(head, body)}"


def _largest(result: Figures) -> str:
    head = [f"within {result['budget'] / 2**30:g} GiB", "largest physical batch"]
    body = [
        [c["name"], c.get("error") or (f"{c['largest']:,}" if c["largest"] else "none")] for c in result["contenders"]
    ]
    return f"### {result['workload']['name']}: largest batch\n\n{_version(result)}\n\n{markdown(head, body)}"


def _zero(result: Figures) -> str:
    head = ["stage", "clipping", "throughput over ordinary", "quartiles", "memory over ordinary"]
    body = [
        [
            row["stage"], row["clipping"], f"{row['throughput']['median']:.2f}",
            f"{row['throughput']['low']:.2f}–{row['throughput']['high']:.2f}", f"{row['memory']:.2f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    setting = result["setting"]
    where = f"{setting['ranks']} ranks, {setting['precision']}, {setting['device']}"
    return f"### {result['workload']['name']} by ZeRO stage\n\n{where}. {_version(result)}\n\n{markdown(head, body)}"


def _profile(result: Figures) -> str:
    """Return the time by group of operators: of each workload the ordinary step, and the private one's excess."""
    found = result["workloads"]
    groups = list(dict.fromkeys(group for one in found for group in one["groups"]))
    body = []
    for group in sorted(groups, key=lambda group: group == "whole step"):
        cells = [group]
        for one in found:
            at = one["groups"].index(group) if group in one["groups"] else None
            ordinary, private = (0.0, 0.0) if at is None else (one["ordinary"][at], one["private"][at])
            cells.append(f"{ordinary:,.1f} {private - ordinary:+,.1f}")
        body.append(cells)
    fixed = [f"{one['fixed'][0]:,.1f} {one['fixed'][1] - one['fixed'][0]:+,.1f}" for one in found]
    body.append(["the same model, with tiny layers", *fixed])
    head = ["ms of an ordinary step, and more in a private one", *(one["workload"] for one in found)]
    setting = f"`{result['contender']}`, {result['threads']} threads, under the profiler, which slows small operators."
    return f"### Where the time goes\n\n{setting}\n\n{markdown(head, body)}"


def _noise(result: Figures) -> str:
    found = result["kinds"]
    columns = list(dict.fromkeys((row["dtype"], row["threads"]) for row in found))
    cells = {(row["kind"], row["dtype"], row["threads"]): f"{row['ns']:.1f}" for row in found}
    body = [[f"`{kind}`", *(cells[kind, *c] for c in columns)] for kind in dict.fromkeys(row["kind"] for row in found)]
    head = [
        "ns an element, norm and division included",
        *(f"{dtype}, {threads} thread{'s' * (threads > 1)}" for dtype, threads in columns),
    ]
    return f"### Noise\n\n{markdown(head, body)}"


def _verification(result: Figures) -> str:
    """Return the time that verification adds to 1,000 steps of one micro-batch, a row per workload."""
    body = [
        [
            name,
            *(f"{1e3 * row[key]:,.1f}" for key in ("seconds", "first", "later")),
            f"{1e3 * row['look']:.2f}",
            f"{row['share']:.1%}",
        ]
        for name, row in result["costs"].items()
    ]
    head = ["", "a step, ms", "the first verification", "a later one", "a look at the model", "of 1,000 steps"]
    return f"### Verification\n\n{markdown(head, body)}"


def fixed_cost(result: Figures) -> str:
    """Return a table for each number of blocks: times and counts of a step."""
    head = ["", "ms", "over ordinary", "quartiles", "Python calls", "operators", "reads by the host"]
    parts = []
    for one in result["depths"]:
        body = [
            [
                f"{step['program']}, {step['style']}", f"{1e3 * step['seconds']['median']:,.1f}",
                f"{step['ratio']['median']:.2f}", f"{step['ratio']['low']:.2f}–{step['ratio']['high']:.2f}",
                *("–" if key not in step else f"{step[key]:,}" for key in ("calls", "operators", "reads")),
            ]
            for step in one["steps"]
        ]  # fmt: skip
        parts.append(f"{one['blocks']} blocks of width {one['width']}, one thread:\n\n{markdown(head, body)}")
    return "\n\n".join(parts)


def _fixed_cost(result: Figures) -> str:
    return f"### The fixed cost of a step\n\n{_version(result)}\n\n{fixed_cost(result)}"


def _data(result: Figures) -> str:
    drawn = [
        [
            f"{row['sample_size']:,}", f"{row['batch_size']:,}", f"{1e3 * row['seconds']:,.1f}",
            f"{row['peak_bytes'] / MIB:,.0f}",
        ]
        for row in result["draws"]
    ]  # fmt: skip
    waits = [
        [name, f"{1e3 * row['seconds']:,.0f}", f"{1e3 * row['waiting']:,.1f}", f"{row['waiting'] / row['seconds']:.1%}"]
        for name, row in result["waiting"].items()
    ]
    return "\n\n".join(
        [
            "### Data",
            markdown(["samples of the data set", "of a logical batch", "ms to draw and plan it", "MiB"], drawn),
            markdown(["eight micro-batches", "ms of a step", "ms in which it waits for data", "share"], waits),
        ]
    )


def _packed(result: Figures) -> str:
    size, text, load = result["size"], result["text"], result["environment"]["load"]
    by = {(row["packed"], row["private"]): row for row in result["rows"]}
    body = [
        [
            "packed" if packed else "padded", f"{by[packed, True]['fill']:.0%}",
            f"{by[packed, True]['tokens_per_second']:,.0f}", f"{by[packed, False]['tokens_per_second']:,.0f}",
            f"{by[packed, True]['tokens_per_second'] / by[packed, False]['tokens_per_second']:.2f}",
        ]
        for packed in (True, False)
    ]  # fmt: skip
    gain = by[True, True]["tokens_per_second"] / by[False, True]["tokens_per_second"]
    head = ["rows", "text in them", "tokens/s, private", "tokens/s, ordinary", "private over ordinary"]
    return "\n\n".join(
        [
            "### Packed rows",
            f"{_version(result)}",
            f"{text['documents']:,} paragraphs of Python's documentation, {text['mean']:.0f} bytes on average (median "
            f"{text['median']}), cut at {size['length']}; a GPT of width {size['width']} and {size['depth']} blocks, "
            f"one thread; CPU time of {result['timed_steps']} steps each, at a load of {load:g}. Packed private rows "
            f"train {gain:.1f} times as many tokens a second, at equal epsilon.",
            markdown(head, body),
        ]
    )


def _tokens(result: Figures) -> str:
    body = [
        [row["source"], str(row["workers"] or "none"), f"{row['gib_per_s']:.2f}", f"{row['seconds_per_step']:.1f}"]
        for row in result["rows"]
    ]
    head = ["read from", "processes that read", "GiB/s", "seconds for a step's 2 GiB"]
    note = (
        f"{result['sequences']:,} sequences of 1,024 tokens of 4 bytes, {result['gib']:g} GiB, in random order, 256 "
        f"at a time, at a load of {result['environment']['load']:g}. Written at {result['write']:.2f} GiB/s. "
        f'"disk": the system was asked to drop its cache of the file.'
    )
    return "\n\n".join(["### Random reads of a TokenStore", _version(result), note, markdown(head, body)])


def _units(result: Figures) -> str:
    body = [
        [row["model"], str(row["rows_per_unit"]), f"{row['ratio']:.2f}", _cell(row.get("memory_ratio"))]
        for row in result["rows"]
    ]
    head = ["", "rows of a unit", "time over ordinary", "memory over ordinary"]
    load = result["environment"]["load"]
    note = (
        f"{result['samples']} rows a step in every case, one thread; the least CPU time of {result['rounds']} steps in "
        f"turns, at a load of {load:g}. Without memory where it was not measured."
    )
    return "\n\n".join(["### Units of several rows", _version(result), note, markdown(head, body)])


def _correlated_training(result: Figures) -> str:
    settings: dict[tuple[Any, ...], list[Figures]] = {}
    for row in result["rows"]:
        settings.setdefault((row["task"], row["epsilon"], row["epochs"]), []).append(row)
    body = [
        [f"{task}, ε = {epsilon:g}, {epochs}", *(_score(row, found[0]) for row in found)]
        for (task, epsilon, epochs), found in settings.items()
    ]
    head = ["task, ε, epochs", *dict.fromkeys(row["mechanism"] for row in result["rows"])]
    note = (
        "Accuracy of digits, loss in nats a byte of pydoc: mean ± deviation of five seeds on test samples; in brackets "
        f"bands, and noise in prefix sums over that of DP-SGD. {result.get('made', '')}".rstrip()
    )
    return "\n\n".join(["### Training with correlated noise", _version(result), note, markdown(head, body)])


def _score(row: Figures, plain: Figures) -> str:
    score = f"{row['mean']:.3f} ± {row['deviation']:.3f}"
    return score if row is plain else f"{score} ({row['bands']}, {row['error'] / plain['error']:.2f})"


_PARTS: dict[str, Callable[[Figures], str]] = {
    "workload": _workload,
    "sweep": _sweep,
    "largest-batch": _largest,
    "zero": _zero,
    "profile": _profile,
    "fixed-cost": _fixed_cost,
    "noise": _noise,
    "data": _data,
    "verification": _verification,
    "packed": _packed,
    "units": _units,
    "tokens": _tokens,
    "correlated-training": _correlated_training,
}
"""The table of a results file, by its kind, in the order of the page."""
