"""Peak memory of a training step in a fresh process."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from dpshard.applications.benchmark.timing import Step
from dpshard.errors import DpshardError

Make = Callable[[], Step]

STEPS = 3
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's mallopt(3)


class OutOfMemoryError(DpshardError, MemoryError):
    """The process was killed, or filled its GPU."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function` in a new process, or raise OutOfMemoryError."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=return_what_is_freed) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise OutOfMemoryError(
                "The measured process was killed, perhaps because memory ran out. Measure a smaller batch."
            ) from error


def peak_of(make: Make) -> int:
    """Return peak bytes, in a fresh process that has loaded its code."""
    gc.collect()
    if torch.cuda.is_available():
        return _peak_of_gpu(make)
    return_what_is_freed()
    before = _status("VmRSS")
    step = make()
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark: proc(5)
    for _ in range(STEPS):
        step()
    return _status("VmHWM") - before


def _peak_of_gpu(make: Make) -> int:
    before = torch.cuda.memory_allocated()
    try:
        step = make()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemoryError(" ".join(str(error).split())) from error
    return torch.cuda.max_memory_allocated() - before


def return_what_is_freed() -> None:
    """Make glibc return freed memory at once."""
    libc = ctypes.CDLL(None)
    for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        libc.mallopt(parameter, 65536)
    libc.malloc_trim(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DpshardError(f"/proc/self/status has no {field}: dpshard measures CPU memory only on Linux.")
