"""Results as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_files
from benchmarks.contenders import BASELINE
from benchmarks.tables import ratio_at
from dpshard.applications.cli import plots

Figures = Mapping[str, Any]


def draw(folder: Path) -> list[Path]:
    """Draw a PNG for every kind of results in `folder`. Raises ConfigurationError without matplotlib."""
    with plots.styled():
        pictures: dict[str, Any] = {}
        if workloads := results_files.read(folder, "workload"):
            pictures["workloads"] = _workloads(workloads)
        pictures |= {result["name"]: _sweep(result) for result in results_files.read(folder, "sweep")}
        pictures |= {result["name"]: _zero(result) for result in results_files.read(folder, "zero")}
        for result in results_files.read(folder, "correlated-training"):
            pictures[result["name"]] = _correlated_training(result)
        return [plots.save(figure, folder / f"{name}.png") for name, figure in pictures.items()]


def _workloads(results: Sequence[Figures]) -> Any:
    """Draw a row per workload: times with quartiles, and memory, relative to the ordinary step."""
    height = sum(0.6 + 0.28 * len(_shown(r)) for r in results)
    figure = plots.new_figure(figsize=(11, 0.8 + height))
    ratios = [0.6 + 0.28 * len(_shown(r)) for r in results]
    axes = figure.subplots(len(results), 2, squeeze=False, height_ratios=ratios)
    for (left, right), result in zip(axes, results, strict=True):
        shown = _shown(result)[::-1]
        names = [c["name"] for c in shown]
        colours = [plots.COLOURS[0] if name.startswith("dpshard") else "#b0b7c3" for name in names]
        medians = [c["ratio"]["median"] for c in shown]
        errors = [
            [c["ratio"]["median"] - c["ratio"]["low"] for c in shown],
            [c["ratio"]["high"] - c["ratio"]["median"] for c in shown],
        ]
        left.barh(names, medians, xerr=errors, color=colours, height=0.65, error_kw={"ecolor": "0.3", "lw": 1})
        left.axvline(1, color="0.3", linewidth=1)
        left.axvline(result["floor"]["ratio"], color=plots.COLOURS[1], linewidth=1, linestyle="--")
        left.set_title(f"{result['workload']['name']}, {result['workload']['title']}: time over the ordinary step")
        right.barh(names, [ratio_at(result, name, "peak_bytes") or 0 for name in names], color=colours, height=0.65)
        right.axvline(1, color="0.3", linewidth=1)
        right.set_title("peak memory over it")
        right.set_yticklabels([])
    return figure


def _shown(result: Figures) -> list[Figures]:
    return [c for c in result["contenders"] if "ratio" in c and c["name"] != BASELINE]


def _sweep(result: Figures) -> Any:
    figure = plots.new_figure(figsize=(10, 4))
    points, values = result["points"], result["values"]
    axes = figure.subplots(1, 2)
    for ax, what, title in zip(axes, ("ratio", "peak_bytes"), ("Time", "Peak memory"), strict=True):
        for c in _shown(points[0]):
            line = [ratio_at(point, c["name"], what) for point in points]
            if any(line):
                ax.plot(values, [float("nan") if y is None else y for y in line], marker="o", label=c["name"])
        ax.axhline(1, color="0.3", linewidth=1)
        ax.set_title(f"{title} over the ordinary step")
        ax.set_xlabel(result["axis"])
        ax.set_xscale("log", base=2)
    axes[0].legend()
    return figure


def _zero(result: Figures) -> Any:
    figure = plots.new_figure(figsize=(10, 4))
    stages = list(dict.fromkeys(row["stage"] for row in result["rows"]))
    clippings = list(dict.fromkeys(row["clipping"] for row in result["rows"]))
    width = 0.8 / len(clippings)
    for ax, what, title in zip(figure.subplots(1, 2), ("throughput", "memory"), ("Throughput", "Memory"), strict=True):
        for i, clipping in enumerate(clippings):
            rows = [row for row in result["rows"] if row["clipping"] == clipping]
            heights = [row[what]["median"] if what == "throughput" else row[what] for row in rows]
            places = [stages.index(row["stage"]) + (i - (len(clippings) - 1) / 2) * width for row in rows]
            ax.bar(places, heights, width=width, label=clipping, color=plots.COLOURS[i % len(plots.COLOURS)])
        ax.set_xticks(range(len(stages)), stages)
        ax.axhline(1, color="0.3", linewidth=1)
        ax.set_title(f"{title} of private over ordinary training")
    ax.legend()
    return figure


def _correlated_training(result: Figures) -> Any:
    """Draw the scores of each task over epsilon and epochs, a point with its deviation per mechanism."""
    tasks = list(dict.fromkeys(row["task"] for row in result["rows"]))
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in result["rows"]))
    figure = plots.new_figure(figsize=(10, 4))
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for ax, task in zip(axes, tasks, strict=True):
        rows = [row for row in result["rows"] if row["task"] == task]
        places = {place: at for at, place in enumerate(dict.fromkeys((r["epsilon"], r["epochs"]) for r in rows))}
        for i, mechanism in enumerate(mechanisms):
            own = [row for row in rows if row["mechanism"] == mechanism]
            x = [places[row["epsilon"], row["epochs"]] + 0.18 * (i - 1) for row in own]
            score, deviation = ([row[what] for row in own] for what in ("mean", "deviation"))
            ax.errorbar(x, score, yerr=deviation, fmt="o", capsize=3, color=plots.COLOURS[i], label=mechanism)
        ax.set_xticks(list(places.values()), [f"ε = {e:g}\n{n} epoch{'s' * (n > 1)}" for e, n in places])
        ax.set_title("pydoc: loss, nats a byte" if task == "pydoc" else f"{task}: accuracy")
    axes[-1].legend()
    return figure
