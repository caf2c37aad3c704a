"""dpshard in any style and mode, and training without privacy."""

from __future__ import annotations

from torch import Tensor

from benchmarks.contenders.contender import Contender, Task, copies
from dpshard.applications.benchmark import Batch, NonPrivate, Privacy, Private


class Ordinary(Contender):
    """PyTorch without privacy: the baseline."""

    is_private = False

    def __init__(self, task: Task, *, compiled: bool) -> None:
        self._training = NonPrivate(task.subject(), rows=task.workload.batch, lr=task.lr, compiled=compiled)

    def step(self) -> Batch:
        return self._training.step()

    def parameters(self) -> dict[str, Tensor]:
        return copies(self._training.subject.model)


class Dpshard(Contender):
    """dpshard's engine."""

    def __init__(self, task: Task, style: str = "all-layer", mode: str = "auto", *, compiled: bool) -> None:
        privacy = Privacy(
            clipping_style=style,
            clipping_mode=mode,
            max_grad_norm=task.threshold,
            noise_multiplier=task.noise_multiplier,
        )
        subject = task.subject()
        self._training = Private(subject, privacy, rows=task.workload.batch, lr=task.lr, compiled=compiled)
        self.groups = self._training.groups

    def step(self) -> Batch:
        return self._training.step()

    def parameters(self) -> dict[str, Tensor]:
        return copies(self._training.subject.model)
