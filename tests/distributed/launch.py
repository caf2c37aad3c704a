"""Starts a worker script on several ranks of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def launch(worker: str, world_size: int, *arguments: str, timeout: float = 280) -> list[Any]:
    """What each rank of `worker` reports; a rank that fails, or hangs, fails the test with its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), environment.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, str(FOLDER / worker), *arguments], capture_output=True, text=True, timeout=timeout, env=environment
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    assert line is not None, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads(line.removeprefix("RESULT "))
