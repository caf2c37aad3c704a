"""Launcher of the ranks of a sharded run.

[Note: Who reports an error]
When a rank fails, the others lose their connections and fail, too. Only the first prints its error (world.py); for a
killed rank the launcher does, and it ends ranks that hang. Ranks have sessions of their own: the launcher forwards
Ctrl-C, and they agree on a last step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpshard.applications.cli import console

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

STORE = "DPSHARD_STORE"
"""Environment variable: the file through which ranks connect."""
LIFELINE = "DPSHARD_LIFELINE"
"""Environment variable: a descriptor that closes with the launcher."""
LOST = 75
"""Exit code of a rank that lost a connection."""
PATIENCE = 20.0
"""Seconds that other ranks have to end after a failure."""


def joined() -> bool:
    """Return True if this process is a rank, started by `start`, torchrun, or SLURM's srun."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "RANK" not in os.environ:
        _translate_slurm()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(count: int, arguments: Sequence[str]) -> int:
    """Run `dpshard ARGUMENTS` as `count` ranks; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="dpshard-") as scratch, stop_requests() as signals:
        lifeline, ours = os.pipe()
        threads = str(max(1, (os.cpu_count() or 1) // count))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, STORE: str(Path(scratch) / "store")}
        environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), LIFELINE: str(lifeline)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "dpshard", *arguments],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=[lifeline],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]
        os.close(lifeline)
        try:
            return _watch(ranks, signals)
        finally:
            os.close(ours)
            for rank in ranks:
                rank.kill()
                rank.wait()


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM; a second signal acts as usual."""
    received: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def note(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(ranks: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    forwarded, deadline = 0, None
    while None in (codes := [rank.poll() for rank in ranks]):
        for number in signals[forwarded:]:
            forwarded += 1
            for rank in ranks:
                rank.send_signal(number)  # no effect on an ended rank
        if deadline is None and set(codes) - {None, 0, console.INTERRUPTED}:
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    killed = {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}
    if killed and not signals:
        rank, number = next(iter(killed.items()))
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        console.print_error(f"Rank {rank} was killed by {signal.Signals(number).name}{hint}.")
        return 1
    if signals and (killed or console.INTERRUPTED in codes):
        if killed:
            console.print_error("The run was stopped before it finished a step.")
        return console.INTERRUPTED
    blamed = [code for code in codes if code not in (None, 0, LOST)]
    if LOST in codes and not blamed:
        console.print_error("The connections between the ranks broke, or a rank stopped answering.")
    return blamed[0] if blamed else int(LOST in codes)


def _translate_slurm() -> None:
    environment = os.environ
    environment["RANK"], environment["LOCAL_RANK"] = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment.setdefault("MASTER_ADDR", environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    job = int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))
    environment.setdefault("MASTER_PORT", str(20000 + job % 20000))
