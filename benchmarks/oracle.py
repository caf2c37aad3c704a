"""Check that a contender takes the private step: compare its update without noise with single samples' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders.contender import Contender, Task
from benchmarks.workloads import Workload, loss
from dpshard.applications.benchmark import Batch
from dpshard.errors import DpshardError
from tests.oracle import Gradients, factor, norm, per_sample_gradients, relative_error

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest relative error of an update: in float64 from the 1e-6 that Opacus adds to norms, in float32 from rounding."""


class WrongStepError(DpshardError, RuntimeError):
    """A contender computes something else than the private step, so its time means nothing."""


def typical_norm(workload: Workload, **where: Any) -> float:
    """Return the median gradient norm of a few samples: as threshold, it clips some samples and not others.

    `where` are device and dtype.
    """
    subject = Task(workload=workload, threshold=1.0, **where).subject()
    rows = min(5, workload.batch)
    norms = [norm(_gradients(subject.model, subject.x, subject.y, i)) for i in range(rows)]
    return sorted(norms)[rows // 2]


def check(contender: Contender, task: Task, *, steps: int = 2) -> float:
    """Return the largest relative error of the updates of a contender that was made for `task`, without noise.

    Raises WrongStepError if it is above rounding. Steps with an empty batch are skipped.
    """
    worst, seen = 0.0, 0
    model = task.model()
    while seen < steps:
        before = contender.parameters()
        batch = contender.step()
        after = contender.parameters()
        if bool(batch.is_padding.all()):
            continue
        seen += 1
        first = next(iter(before.values()))
        model = model.to(device=first.device, dtype=first.dtype)
        model.load_state_dict(before, strict=False)
        expected = _expected(model, batch, contender.groups or [list(before)], task)
        update = {name: (before[name] - after[name]) / task.lr for name in before}
        worst = max(worst, relative_error(update, expected))
    tolerance = TOLERANCES[first.dtype]
    if not worst <= tolerance:
        raise WrongStepError(
            f"its update differs from that of plain autograd, sample by sample, by {worst:.1e} of its norm "
            f"(rounding: {tolerance:.0e})"
        )
    return worst


def _expected(model: nn.Module, batch: Batch, groups: Sequence[Sequence[str]], task: Task) -> Gradients:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in torch.nonzero(~batch.is_padding).flatten().tolist():
        gradients = _gradients(model, batch.x, batch.y, i)
        for group in groups:
            c = factor(norm(gradients, group), task.threshold / math.sqrt(len(groups)), "abadi")
            for name in group:
                total[name] += c * gradients[name]
    return {name: g / task.expected_batch for name, g in total.items()}


def _gradients(model: nn.Module, x: Tensor, y: Tensor, i: int) -> Gradients:
    return per_sample_gradients(model, (x[i : i + 1], y[i : i + 1]), loss)[0]
