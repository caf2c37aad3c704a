"""The time of a step by groups of operators, beside the ordinary step."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks import oracle
from benchmarks.contenders import BASELINE, Task, make
from benchmarks.workloads import Workload
from dpshard.applications.benchmark.timing import interleave, synchronize

GROUPS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::dot", "aten::mv", "ghost_norm"),
    "convolutions": ("convolution",),
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention"),
    "norm layers": ("layer_norm", "group_norm", "rms_norm", "normalization_gradients"),
    "embeddings": ("embedding", "index_put", "index_add", "index_select", "aten::index", "scatter", "gather"),
    "reductions": ("aten::sum", "aten::mean", "norm", "aten::amax", "softmax", "nll_loss"),
    "copies and fills": ("copy_", "clone", "contiguous", "aten::cat", "fill_", "zero_", "aten::stack"),
    "random numbers": ("normal_", "uniform_", "random_", "randperm", "aten::randn"),
}
"""Names, or parts of names, of operators; the first matching group takes an operator."""
REST = "elementwise and others"
OUTSIDE = "outside of operators"
"""Python, the dispatcher, and on the CPU dpshard's noise, which is not an operator of torch."""
WHOLE = "whole step"


def measure(workload: Workload, name: str, *, steps: int, device: str) -> dict[str, Any]:
    """Return milliseconds of a step by group, of the baseline and of contender `name`, as plain figures."""
    task = Task(workload=workload, threshold=oracle.typical_norm(workload, device=device), device=device)
    ordinary, private = (profile(n, task, steps) for n in (BASELINE, name))
    groups = [group for group in (*GROUPS, REST, OUTSIDE, WHOLE) if ordinary[group] or private[group]]
    return {
        "workload": workload.name,
        "groups": groups,
        "ordinary": [ordinary[group] for group in groups],
        "private": [private[group] for group in groups],
        "fixed": [_fixed(workload, n, device) for n in (BASELINE, name)],
    }


def _fixed(workload: Workload, name: str, device: str, steps: int = 30) -> float:
    """Return milliseconds of a step of the same model with tiny layers: Python, the dispatcher, starts of threads."""
    contender = make(name, Task(workload=workload.narrow(), threshold=1.0, device=device))
    times = interleave({name: contender.step}, rounds=steps, warmup=5)
    return 1e3 * median(times[name])


def profile(name: str, task: Task, steps: int) -> Counter[str]:
    """Return milliseconds of a step by group; the groups add up to the whole step.

    On a GPU the times are those of its kernels, and `outside of operators` is the time without a kernel.
    """
    contender = make(name, task)
    for _ in range(2):
        contender.step()
    on_gpu = task.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            contender.step()
        synchronize()
        seconds = time.perf_counter() - begun
    found: Counter[str] = Counter()
    for event in profiler.key_averages():
        found[group_of(event.key)] += _self_us(event, on_gpu) / 1e3 / steps
    whole = 1e3 * seconds / steps
    # Several threads may run operators at once, so their sum may exceed the time that passed.
    found[OUTSIDE] = 0.0  # ranges of the profiler itself
    found[OUTSIDE] = max(0.0, whole - sum(found.values()))
    found[WHOLE] = whole
    return found


def _self_us(event: Any, on_gpu: bool) -> float:
    return event.self_device_time_total if on_gpu else event.self_cpu_time_total


def group_of(operator: str) -> str:
    """Return the group of an operator or kernel, by its name; REST without a match."""
    for group, names in GROUPS.items():
        if any(operator == n if n.startswith("aten::") else n in operator for n in names):
            return group
    return REST if "::" in operator else OUTSIDE
