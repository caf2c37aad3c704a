"""Starts a worker script on several ranks of this machine."""

import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import torch.distributed as dist

from tests.forks import ROOT, Command, Forked

FOLDER = Path(__file__).parent


class FailedRankError(AssertionError):
    """A rank failed, was killed, or did not end in time; the message is what the ranks printed."""


def launch(worker: str | Path, world_size: int, *arguments: str | Path, timeout: float = 280) -> Any:
    """What `worker` (a file of this folder, or a path) prints behind RESULT: by rank.main, what each rank reports.

    FailedRankError if a rank fails, or hangs longer than `timeout` seconds; the others are killed then.
    """
    printed = prints(["python", FOLDER / worker, *arguments], world_size, timeout=timeout)
    lines = [line for text in printed for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise FailedRankError(f"no RESULT\n{_tails(printed)}")
    return json.loads(lines[0].removeprefix("RESULT "))


def prints(command: Command, world_size: int, *, timeout: float = 280) -> list[str]:
    """What each rank of the command prints (see Forked); FailedRankError as of `launch`."""
    with tempfile.TemporaryDirectory() as folder, _environments(world_size) as environments:
        logs = [Path(folder) / f"rank-{rank}" for rank in range(world_size)]
        ranks: list[Forked] = []
        try:
            for log, environment in zip(logs, environments, strict=True):
                with log.open("wb") as out:
                    ranks.append(
                        Forked(command, env=environment, stdout=out.fileno(), stderr=STDOUT, start_new_session=True)
                    )
            done = _wait(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                _end(rank)
        printed = [log.read_text(errors="replace") for log in logs]
    if not done:
        codes = [rank.returncode for rank in ranks]
        raise FailedRankError(f"exit codes {codes} (-9: killed, also because another had failed)\n{_tails(printed)}")
    return printed


def _tails(printed: Sequence[str]) -> str:
    return "\n".join(f"--- rank {rank}\n{text[-6000:]}" for rank, text in enumerate(printed))


@cache
def together(worker: str, world_size: int, *cases: str, timeout: float = 280) -> dict[str, list[Any]]:
    """What each rank reports of each case, in the order of ranks; the cases run in one group, once for all tests."""
    everyone = launch(worker, world_size, *cases, timeout=timeout)
    assert all(len(results) == len(cases) for results in everyone)
    return {case: [results[i] for results in everyone] for i, case in enumerate(cases)}


def shared(
    worker: str, items: Iterable[Any], case_of: Callable[..., tuple[int, str]], size: int = 5
) -> Callable[..., list[Any]]:
    """A function of an item's parameters: what each rank reports of its case (see `together`), rank by rank.

    `case_of` makes the world size and the case of them. Up to `size` items share a launch, if their world sizes are
    equal, and all or none of them are exhaustive. If that launch fails, each item launches its own case again.
    """
    groups: dict[tuple[int, bool], list[str]] = defaultdict(list)
    places = {}
    for item in items:
        world_size, case = case_of(*item.values)
        group = groups[world_size, bool(item.marks)]
        places[world_size, case] = group, len(group) // size * size
        group.append(case)

    def results(*parameters: Any) -> list[Any]:
        world_size, case = case_of(*parameters)
        group, start = places[world_size, case]
        found = _together_if_none_fails(worker, world_size, *group[start : start + size])
        return (found or together(worker, world_size, case, timeout=120))[case]

    return results


@cache
def _together_if_none_fails(worker: str, world_size: int, *cases: str) -> dict[str, list[Any]] | None:
    try:
        return together(worker, world_size, *cases, timeout=150)
    except FailedRankError as error:
        print(f"{worker} failed with {', '.join(cases)} in one launch; each runs again, alone.\n{error}")
        return None


@contextmanager
def _environments(world_size: int) -> Iterator[list[dict[str, str]]]:
    """Those of the ranks, as of torchrun: this process holds the store in which they meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    del store


def _end(rank: Forked) -> None:
    """Kill it if it runs, and whatever it has forked."""
    rank.kill()
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _wait(ranks: Sequence[Forked], deadline: float) -> bool:
    """Whether all ranks end well before `deadline`; False as soon as one has not."""
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return not any(codes)
        if any(codes):
            return False
        time.sleep(0.02)
    return False
