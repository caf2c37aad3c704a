"""Opacus: per-sample gradients by hooks, and ghost clipping, as its documentation uses them.

Padding has a loss of weight zero, so that batches have a fixed number of rows here, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.contenders.contender import Contender, Task, copies
from benchmarks.contenders.extras import needed
from benchmarks.feed import PoissonFeed
from benchmarks.workloads import per_sample_loss
from dpshard.applications.benchmark import Batch
from dpshard.config import require_choice


class _MaskedLoss:
    """The loss of each sample, zero on padding; under "mean", their sum over B."""

    reduction = "mean"

    def __call__(self, scores: Tensor, y: Tensor, is_padding_B: Tensor) -> Tensor:
        each_B = per_sample_loss(scores, y).masked_fill(is_padding_B, 0.0)
        return each_B.mean() if self.reduction == "mean" else each_B


class Opacus(Contender):
    """Opacus with `hooks` (GradSampleModule) or `ghost` (fast gradient clipping with ghost norms)."""

    def __init__(self, task: Task, mode: str = "hooks") -> None:
        require_choice("opacus", mode, ["hooks", "ghost"])
        needed("opacus", extra="bench")
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        subject = task.subject()
        self._feed = PoissonFeed(subject.x, subject.y, task.workload.batch)
        self._model = subject.model
        sgd = torch.optim.SGD(subject.model.parameters(), lr=task.lr)
        mechanism = {
            "noise_multiplier": task.noise_multiplier,
            "max_grad_norm": task.threshold,
            "expected_batch_size": task.expected_batch,
        }
        self._loss = _MaskedLoss()
        if mode == "hooks":
            self._module = GradSampleModule(subject.model)
            self._optimizer = DPOptimizer(sgd, **mechanism)
        else:
            self._module = GradSampleModuleFastGradientClipping(
                subject.model, max_grad_norm=task.threshold, use_ghost_clipping=True
            )
            self._optimizer = DPOptimizerFastGradientClipping(sgd, **mechanism)
            self._loss = DPLossFastGradientClipping(self._module, self._optimizer, self._loss)

    def step(self) -> Batch:
        batch = self._feed.draw()
        self._loss(self._module(batch.x), batch.y, batch.is_padding).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return batch

    def parameters(self) -> dict[str, Tensor]:
        return copies(self._model)
