"""Measures one GPU in parts: each part has its own process, time limit and folder.

A part that has results is skipped, so a measurement that was cut off resumes. A part that fails or exceeds its time
limit is reported, and the others run. No part begins that might not end in the time for all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kernels, results_files, tables
from benchmarks.contenders import BASELINE
from dpshard.applications.cli.formats import to_json
from dpshard.applications.cli.run_folder import write_atomically
from dpshard.config import require_choice


@dataclass(frozen=True)
class Part:
    """One command of `python -m benchmarks`."""

    name: str
    command: tuple[str, ...]
    minutes: float
    """Time limit."""


_FSDP2 = ("--ranks", "1", "--stage", "fsdp2", "--precision", "bf16", "--rounds", "10")
_STYLES = ("--clipping", "all-layer", "--clipping", "layer-wise")
_PEERS = ("-c", "dpshard:all-layer", "-c", "dpshard:layer-wise", "-c", "opacus:ghost", "-c", "vmap", "--rounds", "10")
KINDS = ("zero", "workload", "kernels")
"""Kinds of results that parts write."""
MODELS = ("G2", "G1", "G3", "G4")

PARTS = tuple(
    part
    for model in MODELS
    for part in (
        Part(f"{model}-eager", ("zero", model, *_FSDP2, *_STYLES, "--clipping", "all-layer:ghost"), 5),
        Part(f"{model}-compiled", ("zero", model, *_FSDP2, *_STYLES, "--compiled"), 6),
    )
) + tuple(Part(f"{model}-peers", ("run", model, *_PEERS, "--no-memory"), 5) for model in MODELS[:2])
"""The most important parts come first; peers, in float32 without FSDP2, come last."""

SELF_TEST = Part("kernels", ("kernels",), 4)
"""Runs before all parts, in a process of its own: a wrong kernel may take its process along."""


def find(names: Sequence[str]) -> list[Part]:
    """Return the named parts, or all. Raises ConfigurationError for an unknown name."""
    by_name = {part.name: part for part in PARTS}
    for name in names:
        require_choice("part", name, list(by_name))
    return [by_name[name] for name in names] or list(PARTS)


def run(
    parts: Sequence[Part],
    out: Path,
    *,
    device: str,
    tiny: bool,
    say: Callable[[str], None],
    minutes: float = float("inf"),
) -> dict[str, str]:
    """Run the parts that have no results, for at most `minutes`; return the failures by part."""
    failures, end = {}, time.monotonic() + 60 * minutes
    for part in parts:
        folder = out / part.name
        if any(results_files.read(folder, kind) for kind in KINDS):
            say(f"{part.name}: has results, skipped")
            continue
        if end - time.monotonic() < 60 * part.minutes:
            say(f"{part.name}: left for the next run, because it may take {part.minutes:g} minutes, and fewer are left")
            continue
        say(f"{part.name}: at most {part.minutes:g} minutes")
        where = ["--device", device, "--out", str(folder), *(["--tiny"] if tiny else [])]
        failure = _run([*part.command, *where], 60 * part.minutes)
        if failure:
            failures[part.name] = failure
            say(f"{part.name} failed: {failure}")
    return failures


def _run(command: Sequence[str], seconds: float) -> str | None:
    """Run a command of the benchmarks; return the failure with the end of the output, or None."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *command],
        cwd=results_files.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # one group with its ranks, for _kill
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
            failure = f"exit code {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            _kill(process)
            printed, _ = process.communicate()
            failure = f"it took longer than {seconds:g} s"
        finally:
            _kill(process)
    return failure and f"{failure}: {printed[-1000:].strip() or 'no output'}"


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its ranks, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


HEAD = ("part", "variant", "throughput / non-private", "quartiles", "ms per step", "memory / non-private")


def rows(out: Path) -> list[list[str]]:
    """Return the rows of the table: one for each measured variant."""
    return [[part.name, *cells] for part in PARTS for cells in _rows_of(out / part.name)]


def _rows_of(folder: Path) -> Iterator[list[str]]:
    for result in results_files.read(folder, "zero"):
        for row in result["rows"]:
            throughput = row["throughput"]
            yield _cells(row["clipping"], throughput, row["seconds"]["median"], f"{row['memory']:.2f}")
    for result in results_files.read(folder, "workload"):
        for c in result["contenders"]:
            if "error" in c:
                yield [c["name"], f"not timed: {c['error']}", "", "", ""]
            elif c["name"] != BASELINE:
                ratio = {"median": c["ratio"]["median"], "low": c["ratio"]["high"], "high": c["ratio"]["low"]}
                throughput = {key: 1 / value for key, value in ratio.items()}
                yield _cells(c["name"], throughput, c["seconds"]["median"], "")


def _cells(name: str, throughput: dict[str, float], seconds: float, memory: str) -> list[str]:
    quartiles = f"{throughput['low']:.2f}–{throughput['high']:.2f}"
    return [name, f"{throughput['median']:.2f}", quartiles, f"{1e3 * seconds:,.1f}", memory]


def write(out: Path, failures: dict[str, str], device: str = "cuda") -> Path:
    """Write gpu.json and the table README.md into `out`; return the table's path."""
    table = rows(out)
    figures: dict[str, Any] = {"head": HEAD, "rows": table, "failures": failures}
    tested = results_files.read(out / SELF_TEST.name, "kernels")
    figures["kernels"] = tested[0]["outcomes"] if tested else {}
    figures["environment"] = results_files.environment()
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "gpu.json", to_json(figures, 1).encode())
    lines = [f"- {name} failed: {' '.join(why.split())}" for name, why in failures.items()]
    left = [part.name for part in PARTS if part.name not in {*failures, *(row[0] for row in table)}]
    if left:
        lines.append(f"- not measured yet: {', '.join(left)}")
    title = "# On one GPU" if device == "cuda" else "# A trial on the CPU"
    text = "\n".join([title, "", tables.markdown(HEAD, table), "", kernels.line(tested), "", *lines])
    write_atomically(out / "README.md", f"{text.rstrip()}\n".encode())
    return out / "README.md"
