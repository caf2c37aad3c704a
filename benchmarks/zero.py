"""Throughput and memory of private over ordinary training, by ZeRO stage: Figures 5 and 7 of DP-ZeRO.

Bu et al. 2023, arXiv:2311.11822. torchrun starts a process per rank. In one launch, ordinary and private steps take
turns on all ranks; for memory, each has its own launch, and a rank reports its peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import results_files
from benchmarks.workloads import Workload
from dpshard.applications.benchmark import Spread, paired_ratio
from dpshard.applications.cli.plan import parse_clipping
from dpshard.config import require_choice
from dpshard.errors import ConfigurationError, DpshardError

STAGES = ("ddp", "zero1", "fsdp2-kept", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
"""Stage 0; 1 by ZeroRedundancyOptimizer; 2 by FSDP2 that keeps gathered parameters; 3 by FSDP2; DeepSpeed's own."""
ORDINARY = "nonprivate"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a comparison of stages."""

    ranks: int = 2
    precision: str = "fp32"
    compiled: bool = False
    """Compile every block."""
    rounds: int = 10
    device: str = "cpu"
    tiny: bool = False


def launches(workloads: Sequence[Workload], stages: Sequence[str], clippings: Sequence[str]) -> int:
    """Return the number of calls of `on_launch` by `measure` for all workloads."""
    return len(workloads) * len(stages) * (2 + len(clippings))


def measure(
    workload: Workload,
    stages: Sequence[str],
    clippings: Sequence[str],
    setting: Setting,
    on_launch: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row per stage and clipping, as plain figures.

    Raises ConfigurationError for unknown stages and clippings, DpshardError with its output if a rank fails.
    """
    for stage in stages:
        require_choice("stage", stage, STAGES)
    for clipping in clippings:
        parse_clipping(clipping)
    if setting.precision not in ("fp32", "bf16"):
        raise ConfigurationError(f"precision={setting.precision!r}: choose fp32 or bf16.")
    rows: list[dict[str, Any]] = []
    for stage in stages:
        names = [ORDINARY, *clippings]
        times = launch("time", stage, workload, names, setting)
        on_launch(f"{workload.name} {stage}: time")
        peaks = {}
        for name in names:
            peaks[name] = launch("memory", stage, workload, [name], setting)[name]
            on_launch(f"{workload.name} {stage}: memory")
        rows += [_row(stage, clipping, times, peaks) for clipping in clippings]
    return {
        "workload": {"name": workload.name, "title": workload.title},
        "sizes": dict(workload.sizes),
        "rows_per_rank": workload.batch,
        "setting": asdict(setting),
        "rows": rows,
    }


def _row(stage: str, clipping: str, times: Mapping[str, list[float]], peaks: Mapping[str, int]) -> dict[str, Any]:
    return {
        "stage": stage,
        "clipping": clipping,
        "seconds": asdict(Spread.of(times[clipping])),
        "ordinary_seconds": asdict(Spread.of(times[ORDINARY])),
        "throughput": asdict(paired_ratio(times[ORDINARY], times[clipping])),
        "peak_bytes": peaks[clipping],
        "ordinary_peak_bytes": peaks[ORDINARY],
        "memory": peaks[clipping] / peaks[ORDINARY],
    }


def launch(what: str, stage: str, workload: Workload, names: Sequence[str], setting: Setting) -> dict[str, Any]:
    """Return rank 0's report on `names`: seconds of every round ("time"), or the largest peak of a rank ("memory")."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={setting.ranks}"]
    job = {"what": what, "stage": stage, "workload": workload.name, "names": list(names), **asdict(setting)}
    threads = str(max(1, len(os.sched_getaffinity(0)) // setting.ranks))
    run = subprocess.run(
        [*command, "-m", "benchmarks.zero_worker", json.dumps(job)],
        cwd=results_files.ROOT,  # the place of this package `benchmarks`, not of the one that Opacus installs
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": threads, **os.environ},
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    if run.returncode or line is None:
        raise DpshardError(f"{stage}, {', '.join(names)}: a rank failed. {run.stderr[-2000:] or run.stdout[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))
