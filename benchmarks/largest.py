"""The largest physical batch with a step within a memory budget, by contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Task, make, reason
from benchmarks.measure import peak_of_contender
from benchmarks.workloads import Workload
from dpshard.applications.benchmark.memory import OutOfMemoryError, in_fresh_process
from dpshard.errors import ConfigurationError

LIMIT = 65536
"""Largest batch tried."""
PRECISION = 16
"""The result is right to one part in PRECISION."""


def search(
    workload: Workload,
    names: Sequence[str],
    *,
    budget: int,
    threads: int,
    device: str,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the largest batch of each contender, as plain figures; 0 where one sample is too much.

    A contender that is missing, or cannot train this model, appears with its error. Raises ConfigurationError for a
    budget beyond the machine's memory.
    """
    if device == "cpu" and 2 * budget > available():
        raise ConfigurationError(
            f"A budget of {budget / 2**30:g} GiB: the search may need twice that, and {available() / 2**30:.1f} GiB "
            f"are free. Choose a smaller one."
        )
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            make(name, Task(workload=workload.at_tiny_size(), threshold=1.0, device=device)).step()
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; the error is its result
            found.append({"name": name, "error": reason(error)})
            continue

        def fits(batch: int, name: str = name) -> bool:
            report(f"{workload.name} {name}: B = {batch}")
            task = Task(workload=replace(workload, batch=batch), threshold=1.0, device=device, dtype=torch.float32)
            try:
                return in_fresh_process(peak_of_contender, name, task, threads) <= budget
            except OutOfMemoryError:
                return False

        found.append({"name": name, "largest": largest_that_fits(fits)})
    return {"workload": {"name": workload.name, "title": workload.title}, "budget": budget, "contenders": found}


def largest_that_fits(fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits, to one part in PRECISION: by doubling, then bisection; 0 if none."""
    if not fits(1):
        return 0
    good, bad = 1, 2
    while bad <= LIMIT and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // PRECISION):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def available() -> int:
    """Return the bytes of memory that processes can still take."""
    for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
