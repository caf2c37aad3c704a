"""Per-sample gradients by torch.func: PyTorch without any library."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.contenders.contender import Contender, Task, copies
from benchmarks.feed import PoissonFeed
from benchmarks.workloads import per_sample_loss
from dpshard.applications.benchmark import Batch


class Vmap(Contender):
    """vmap of grad, norms, and the weighted sum."""

    def __init__(self, task: Task, *, compiled: bool) -> None:
        subject = task.subject()
        self._feed = PoissonFeed(subject.x, subject.y, task.workload.batch)
        self._task, self._model = task, subject.model
        self._trained = dict(subject.model.named_parameters())
        self._optimizer = torch.optim.SGD(subject.model.parameters(), lr=task.lr)
        self._sum = torch.compile(self._clipped_sum) if compiled else self._clipped_sum

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        scores = functional_call(self._model, parameters, (x.unsqueeze(0),))
        return per_sample_loss(scores, y.unsqueeze(0)).sum()

    def _clipped_sum(self, parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        x, y, is_padding_B = batch
        per_sample = vmap(grad(self._loss), in_dims=(None, 0, 0))(parameters, x, y)
        norm_sq_B = torch.stack([g.flatten(1).square().sum(1) for g in per_sample.values()]).sum(0)
        clip_coef_B = (self._task.threshold / norm_sq_B.sqrt()).clamp(max=1.0).masked_fill(is_padding_B, 0.0)
        return {name: torch.tensordot(clip_coef_B, g, 1) for name, g in per_sample.items()}

    def step(self) -> Batch:
        batch = self._feed.draw()
        values = {name: p.detach() for name, p in self._trained.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # the drop is measured here
            sums = self._sum(values, (batch.x, batch.y, batch.is_padding))
        std = self._task.noise_multiplier * self._task.threshold
        for name, p in self._trained.items():
            p.grad = sums[name].add_(torch.randn_like(p), alpha=std).div_(self._task.expected_batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return batch

    def parameters(self) -> dict[str, Tensor]:
        return copies(self._model)
