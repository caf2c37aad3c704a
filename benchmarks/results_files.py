"""Results on disk: one JSON file per run of a workload, with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dpshard.applications.cli.formats import to_json
from dpshard.applications.cli.run_folder import write_atomically
from dpshard.errors import ConfigurationError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/results"
LIBRARIES = ("torch", "opacus", "jax", "deepspeed", "numpy")


def write(folder: Path, name: str, kind: str, figures: Mapping[str, Any]) -> Path:
    """Write `figures` to NAME.json in `folder`, with kind, machine and versions; return the path."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json({"kind": kind, "name": name, **figures, "environment": environment()}, 1).encode())
    return path


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return all results of one kind in `folder`, by name. Raises ConfigurationError for a damaged file."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            figures = json.loads(path.read_text("utf-8"))
            if figures["kind"] == kind:
                found.append(figures)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} does not hold results of a benchmark ({error!r}): remove it.") from error
    return found


def environment() -> dict[str, Any]:
    """Return machine, versions and commit."""
    versions = {name: d.version for name in LIBRARIES for d in metadata.distributions(name=name)}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
