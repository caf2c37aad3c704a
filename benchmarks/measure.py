"""One workload, all contenders: each is checked, then timed in turns, then measured for memory in its own process."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import floor, oracle
from benchmarks.contenders import BASELINE, Contender, Task, make, reason
from benchmarks.workloads import Workload
from dpshard.applications.benchmark import Spread, interleave, paired_ratio
from dpshard.applications.benchmark.memory import in_fresh_process, peak_of
from dpshard.applications.flops import FlopMeter
from dpshard.errors import DpshardError

WARMUP = 2
"""Steps before the clock starts; compiled contenders compile in the first."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a measurement."""

    rounds: int = 20
    threads: int = 2
    memory: bool = True
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def steps_of(names: Sequence[str], settings: Settings) -> int:
    """Return the largest number of calls of `on_step` by `measure`, unless memory runs out."""
    return len(names) * (1 + WARMUP + settings.rounds + settings.memory)


def measure(
    workload: Workload, names: Sequence[str], settings: Settings, on_step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return all measurements of `workload`, as plain figures; the first name is the baseline's.

    A peer that is missing, raises, or computes something else appears with its error, and is not timed. So does each
    contender for which the memory of the device is too small. Another error of dpshard is raised.
    """
    torch.set_num_threads(settings.threads)
    torch.compiler.reset()  # dynamo counts compilations of all workloads, and leaves code eager after a few
    task = Task(
        workload=workload,
        threshold=oracle.typical_norm(workload, device=settings.device, dtype=settings.dtype),
        device=settings.device,
        dtype=settings.dtype,
    )
    found: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    for name in names:
        found[name] |= _checked(name, task)
        _free()
        on_step(f"{workload.name} {name}: checked")
    timing = _timed([name for name in names if "error" not in found[name]], task, settings, on_step)
    times, trainings = timing.times, timing.trainings
    for name, why in timing.lost.items():
        found[name]["error"] = why
    for name, seconds in times.items():
        found[name]["seconds"] = asdict(Spread.of(seconds))
        found[name]["ratio"] = asdict(paired_ratio(seconds, times[BASELINE]))
        own = own_baseline(name)
        if own != BASELINE and own in times:
            found[name]["own_baseline"] = own
            found[name]["own_ratio"] = asdict(paired_ratio(seconds, times[own]))
        if trainings[name].in_torch and "+" not in name:
            with FlopMeter() as meter:
                trainings[name].step()
            found[name]["flops"] = meter.flops
    del timing, trainings
    gc.collect()
    if settings.memory:
        for name in times:
            bare = replace(task)  # without its cached data: the process makes its own
            found[name]["peak_bytes"] = in_fresh_process(peak_of_contender, name, bare, settings.threads)
            on_step(f"{workload.name} {name}: memory")
    subject, speed = task.subject(), floor.machine(task.device, task.dtype)
    least = floor.floor_of(subject, workload.batch, speed)
    return {
        "workload": {"name": workload.name, "title": workload.title, "family": workload.family},
        "rows": workload.batch,
        "sizes": dict(workload.sizes),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "settings": asdict(settings) | {"dtype": str(settings.dtype).removeprefix("torch.")},
        "threshold": task.threshold,
        "floor": floor.as_figures(least, speed, found[BASELINE]["seconds"]["median"]),
        "contenders": list(found.values()),
    }


def own_baseline(name: str) -> str:
    """Return the training without privacy that is otherwise equal to a contender."""
    return "jax:nonprivate" if name.startswith("jax") else BASELINE + ("+compile" if "+compile" in name else "")


@dataclass
class _Timing:
    """Contenders that took turns."""

    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round."""
    trainings: dict[str, Contender] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Why a contender was dropped."""


class _OutOfMemoryError(Exception):
    """The device has too little memory for a step of one contender, `name`, beside the others."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def _timed(names: Sequence[str], task: Task, settings: Settings, on_step: Callable[[str], None]) -> _Timing:
    """Return the times of all contenders that fit; without one that does not, the others begin again.

    Raises DpshardError if the baseline does not fit.
    """
    timing = _Timing()
    while not timing.times:
        left = [name for name in names if name not in timing.lost]
        try:
            timing.times = interleave(
                {name: partial(_step, name, task, timing.trainings) for name in left},
                rounds=settings.rounds,
                warmup=WARMUP,
                on_step=lambda name: on_step(f"{task.workload.name} {name}"),
            )
        except _OutOfMemoryError as error:
            if error.name == BASELINE:
                raise DpshardError(f"{BASELINE} on {task.workload.name}: {error}") from error
            timing.lost[error.name] = f"{error} It was to be timed beside {', '.join(left[: left.index(error.name)])}."
            timing.trainings.pop(error.name, None)
        _free()  # behind the handler, whose error holds tensors of the step
    return timing


def _step(name: str, task: Task, trainings: dict[str, Contender]) -> None:
    """Take a step of a contender, made at its first one: the baseline, which is first, finds the most memory."""
    try:
        if name not in trainings:
            trainings[name] = make(name, task)
        trainings[name].step()
    except torch.OutOfMemoryError as error:
        raise _OutOfMemoryError(name, reason(error)) from error


def _free() -> None:
    """Give memory that nothing uses back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _checked(name: str, task: Task) -> dict[str, Any]:
    """Return the error of the contender's update without noise, or the reason why it is not timed."""
    lr = 1.0  # rounding of the parameters would hide a small update
    trial = replace(task, noise_multiplier=0.0, lr=lr)
    try:
        contender = make(name, trial)
        if not contender.is_private:
            return {}
        error = oracle.check(contender, trial)
    except Exception as error:
        fits = not isinstance(error, torch.OutOfMemoryError)
        if name.startswith(("dpshard", BASELINE)) and fits:
            raise DpshardError(f"{name} on {task.workload.name}: {error}") from error
        return {"error": reason(error)}
    return {"update_error": error}


def peak_of_contender(name: str, task: Task, threads: int) -> int:
    """Return the peak of bytes of a training without its data set; call it in a fresh process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    rehearsal = Task(workload=task.workload.at_tiny_size(), threshold=1.0, device=task.device, dtype=task.dtype)
    make(name, rehearsal).step()  # loads the code of a step
    _ = task.data  # not a part of training
    return peak_of(lambda: make(name, task).step)
