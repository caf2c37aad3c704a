"""The peak of memory of a training step, in a process of its own.

On the CPU it is what the kernel saw resident: the high-water mark of the process (VmHWM of /proc/self/status), reset
(by /proc/self/clear_refs) after a first step, less what was resident before the model was built. On a GPU it is what
torch's allocator had handed out at most.
"""

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
"""Builds model, optimizer and what belongs to them, and returns the step."""

STEPS = 3
"""Steps over which the peak is taken: Poisson batches differ."""
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's mallopt(3)


class OutOfMemoryError(DpshardError, MemoryError):
    """The measured process was killed, or its GPU was full."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a new process; both it and the arguments must be picklable.

    Raises what it raises, and OutOfMemoryError if the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=return_what_is_freed) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise OutOfMemoryError("The measured process was killed: there may be too little memory.") from error


def peak_of(make: Make) -> int:
    """Bytes that a training takes at most while it steps, its model included; call it in a fresh process.

    What is loaded with the first use of a library belongs to no step: use the libraries before.
    """
    gc.collect()
    if torch.cuda.is_available():
        return _peak_of_gpu(make)
    return_what_is_freed()
    before = _status("VmRSS")
    step = make()
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark to what is resident now
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
    """Have glibc give freed tensors back at once, so that what is resident is what is alive, for every contender."""
    libc = ctypes.CDLL(None)
    for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        libc.mallopt(parameter, 65536)
    libc.malloc_trim(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DpshardError(f"/proc/self/status has no {field}: memory can be measured on Linux only.")
