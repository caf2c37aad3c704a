"""One rank of a sharded run."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import typer

from dpshard.applications.cli import console, launch
from dpshard.backends.ranks import Ranks
from dpshard.errors import ConfigurationError, DpshardError

_LOST = re.compile(r"[Cc]onnection (closed|reset)|Broken pipe|[Ss]ocket|remote process exited|NCCL|timed? ?out")


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Yield all ranks; exit after a run of several. Rank 0 prints, or the first that fails."""
    if not launch.joined():
        yield Ranks()
        return
    _live_no_longer_than_the_launcher()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    console.out.quiet = rank > 0
    store: Any = None
    code = 0
    try:
        store = _store(rank, size)
        kinds = "gloo" if torch.device(device).type == "cpu" else "cpu:gloo,cuda:nccl"
        if kinds != "gloo":
            _take_gpu()
        dist.init_process_group(kinds, store=dist.PrefixStore("train", store), rank=rank, world_size=size)
        # torch 2.13 renamed a collective; older supported versions have only the old name.
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        with warnings.catch_warnings():
            if rank > 0:
                warnings.simplefilter("ignore")
            yield Ranks()
        dist.barrier()
    except typer.Exit as end:
        code = end.exit_code
    except KeyboardInterrupt:
        code = console.INTERRUPTED
    except BaseException as error:  # noqa: BLE001
        code = _report(error, store, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the process group would abort an ordinary exit


def _store(rank: int, size: int) -> Any:
    if launch.STORE in os.environ:
        return dist.FileStore(os.environ[launch.STORE], size)
    return next(dist.rendezvous("env://", rank, size))[0]


def _take_gpu() -> None:
    count, own = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if own >= count:
        raise ConfigurationError(
            f"Rank {own} of this machine has no GPU: there are {count}. Take --nproc {count}, or --device cpu."
        )
    torch.cuda.set_device(own)


def _report(error: BaseException, store: Any, rank: int) -> int:
    code = console.USER_ERROR if isinstance(error, DpshardError) else 1
    lost = _LOST.search(str(error)) is not None
    if lost and launch.STORE in os.environ:
        return launch.LOST  # the failed rank or the launcher reports the reason
    try:
        first = store is None or int(store.compare_set("error", "", str(rank))) == rank
    except (RuntimeError, ValueError):
        first = True  # rank 0, which holds the store, has exited
    if first:
        where = f"rank {rank}: " if rank else ""
        if isinstance(error, DpshardError):
            console.print_error(f"{where}{error}")
        elif lost:
            console.print_error(f"{where}lost the connection to another rank: {error}")
        else:
            traceback.print_exception(error)
            console.print_error(f"{where}{type(error).__name__}: {error}")
    return code


def _live_no_longer_than_the_launcher() -> None:
    descriptor = os.environ.get(launch.LIFELINE)
    if descriptor is None:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
