"""Starts the ranks of a sharded run on this machine, or finds out that somebody else has started them.

[Note: Who tells what went wrong]
A rank that fails takes the others with it: their connections to it break. Only the first one says why
(world.py). A rank that was killed says nothing, so the process that has started the ranks does; and it does
not wait for ranks that hang after another has failed. Ctrl-C reaches that process alone, for ranks have sessions of
their own: it hands the signal to all of them, they agree on the step after which they stop, and save.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dpshard.applications.cli import console

STORE = "DPSHARD_STORE"
"""Environment variable: the file over which ranks that `start` has started find each other."""
LIFELINE = "DPSHARD_LIFELINE"
"""Environment variable: a file descriptor that is closed when the process that has started a rank is gone."""
LOST = 75
"""Exit code of a rank that has lost the connection to another: it is not the one to blame."""
PATIENCE = 20.0
"""Seconds that ranks have to end after another has failed."""


def joined() -> bool:
    """Whether this process is a rank of several: started by `start`, by torchrun, or by srun of SLURM."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "RANK" not in os.environ:
        _translate_slurm()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(count: int, arguments: Sequence[str]) -> int:
    """Run `dpshard ARGUMENTS` as `count` ranks; the exit code of the run."""
    with tempfile.TemporaryDirectory(prefix="dpshard-") as scratch:
        lifeline, ours = os.pipe()
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
            **os.environ,
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            STORE: str(Path(scratch) / "store"),
            LIFELINE: str(lifeline),
        }
        command = [sys.executable, "-m", "dpshard", *arguments]
        with _Forwarded() as signals:
            ranks = [
                subprocess.Popen(
                    command,
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
                for rank in ranks:
                    rank.kill()
                    rank.wait()
                os.close(ours)


class _Forwarded:
    """Collects SIGINT and SIGTERM; the second one acts as ever."""

    def __enter__(self) -> list[int]:
        self.received: list[int] = []
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.before:
            signal.signal(number, self._note)
        return self.received

    def _note(self, number: int, _frame: object) -> None:
        self.received.append(number)
        signal.signal(number, self.before[signal.Signals(number)])

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _watch(ranks: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    forwarded, deadline = 0, None
    while None in (codes := [rank.poll() for rank in ranks]):
        for number in signals[forwarded:]:
            forwarded += 1
            for rank in ranks:
                rank.send_signal(number)  # does nothing to one that has ended
        if deadline is None and set(codes) - {None, 0, console.INTERRUPTED}:
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    killed = {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}
    if killed and not signals:
        rank, number = next(iter(killed.items()))
        hint = ": there may be too little memory" if number == signal.SIGKILL else ""
        console.print_error(f"Rank {rank} was killed by {signal.Signals(number).name}{hint}.")
        return 1
    if signals and (killed or console.INTERRUPTED in codes):
        if killed:
            console.print_error("The run was stopped before a step could be finished.")
        return console.INTERRUPTED
    blamed = [code for code in codes if code not in (None, 0, LOST)]
    if LOST in codes and not blamed:
        console.print_error("The connections between the ranks broke, or a rank answered no more.")
    return blamed[0] if blamed else int(LOST in codes)


def _translate_slurm() -> None:
    """Srun's variables in the names that torch knows."""
    environment = os.environ
    environment["RANK"], environment["LOCAL_RANK"] = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment.setdefault("MASTER_ADDR", environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    job = int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))
    environment.setdefault("MASTER_PORT", str(20000 + job % 20000))
