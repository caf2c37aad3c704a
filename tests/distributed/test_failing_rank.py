"""A rank that raises ends the others within seconds, with its error."""

import os
import subprocess
import sys
import time

import pytest

from tests.distributed.launch import FOLDER


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("leak", "UnsupportedParameterError: weight: a gradient reached it"),
        ("course", "BatchLayoutError: On rank 1 the model takes another course"),
    ],
)
def test_a_failing_rank_ends_the_run(how: str, message: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    started = time.monotonic()
    run = subprocess.run(
        [*command, str(FOLDER / "failing_worker.py"), how], capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode != 0
    assert message in run.stderr, run.stderr[-4000:]
    assert time.monotonic() - started < 55  # the group's own time-out is 60 seconds
