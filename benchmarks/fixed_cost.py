"""The fixed cost of a private step: many equal blocks, so narrow that their arithmetic hardly counts.

What is left is Python, the dispatcher, and the launches of operators. Beside the times stand counts, which repeat
exactly: Python calls of a step, its operators, and operators that bring a number to the host.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import POOL, Workload, loss
from dpshard.applications.benchmark import NonPrivate, Privacy, Private, Spread, Subject, interleave, paired_ratio
from dpshard.applications.benchmark.training import Training
from dpshard.config import require_choice

PROGRAMS = ("eager", "whole", "blocks")
"""Nothing compiled, the whole model, or each block by `block.compile()`."""
ORDINARY = "ordinary"
STYLES = ("all-layer", "layer-wise", "block-wise")
WARMUP = 5
"""Steps before the clock starts. Verified are the first step, and the 2nd, 4th, 8th, ..."""
COUNTED = 3
"""Steps whose least count is taken: of three steps that follow each other, one is not verified."""
_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


def workload(blocks: int, width: int = 32) -> Workload:
    """Return a GPT of equal, narrow blocks."""
    sizes = {"width": width, "layers": blocks, "heads": 2, "vocabulary": 64, "length": 16, "tied": False}
    return Workload(name=f"{blocks} blocks", title="GPT", family="gpt", batch=4, sizes=sizes, tiny={})


def measure(
    blocks: int,
    programs: Sequence[str] = PROGRAMS,
    styles: Sequence[str] = STYLES,
    *,
    rounds: int = 20,
    width: int = 32,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return times and counts of a step on one thread, of every style in every program, as plain figures."""
    for name in programs:
        require_choice("program", name, list(PROGRAMS))
    torch.compiler.reset()  # of several depths each begins without compiled code
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        task = workload(blocks, width)
        trainings = {(p, s): _training(task, p, s) for p in programs for s in (ORDINARY, *styles)}
        labels = {f"{program} {style}": training for (program, style), training in trainings.items()}
        steps = {label: training.step for label, training in labels.items()}
        times = interleave(steps, rounds=rounds, warmup=WARMUP, on_step=on_step)
        found = []
        for (program, style), training in trainings.items():
            seconds, ordinary = times[f"{program} {style}"], times[f"{program} {ORDINARY}"]
            figures = {"seconds": asdict(Spread.of(seconds)), "ratio": asdict(paired_ratio(seconds, ordinary))}
            found.append({"program": program, "style": style, **figures, **_counts(training, program)})
    finally:
        torch.set_num_threads(threads)
    return {"blocks": blocks, "width": width, "rounds": rounds, "steps": found}


def steps_of(programs: Sequence[str], styles: Sequence[str], rounds: int) -> int:
    """Return the number of calls of `on_step` by `measure`."""
    return len(programs) * (1 + len(styles)) * (WARMUP + rounds)


def _training(task: Workload, program: str, style: str) -> Training:
    model = task.build().train()
    if program == "blocks":
        for block in model.get_submodule("blocks").children():
            block.compile()
    subject, compiled = Subject(model, *task.data(POOL * task.batch), loss), program == "whole"
    if style == ORDINARY:
        return NonPrivate(subject, rows=task.batch, compiled=compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Private(subject, Privacy(clipping_style=style), rows=task.batch, compiled=compiled)


def _counts(training: Training, program: str) -> dict[str, int]:
    """Return the counts of a step; compiled code hides its operators."""
    counts = {"calls": min(python_calls(training.step) for _ in range(COUNTED))}
    if program == "eager":
        operators = min((_operators(training.step) for _ in range(COUNTED)), key=Counter.total)
        counts |= {"operators": operators.total(), "reads": sum(operators[name] for name in _READS)}
    return counts


def python_calls(step: Callable[[], object]) -> int:
    """Return the number of Python functions that `step` calls, those of other libraries and of torch included."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


def _operators(step: Callable[[], object]) -> Counter[str]:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[func._schema.name.partition("::")[2]] += 1
            return func(*args, **(kwargs or {}))

    found: Counter[str] = Counter()
    with Counting():
        step()
    return found
