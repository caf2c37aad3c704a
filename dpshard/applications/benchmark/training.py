"""Whole steps, private and ordinary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import TensorDataset

from dpshard.applications.benchmark.subject import Subject
from dpshard.engine import PrivacyEngine

LEARNING_RATE = 1e-4
"""So small that weights hardly change."""
STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch."""

    x: Any
    y: Any
    is_padding: Tensor
    """Bool [B]."""


class Training(Protocol):
    """A training."""

    def step(self) -> Batch:
        """Take one step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """Settings of the mechanism."""

    clipping_style: str = "all-layer"
    clipping_mode: str = "auto"
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0


def expected_batch(rows: int) -> int:
    """Return a size of batches that rarely reach `rows`."""
    return max(1, round(0.75 * rows))


class NonPrivate:
    """Ordinary training on random rows."""

    def __init__(self, subject: Subject, *, rows: int | None = None, lr: float = LEARNING_RATE, compiled: bool = False):
        self.subject = subject
        self.rows = rows or subject.rows
        # model.compile() does not compile torch's own modules, such as nn.Sequential.
        self._called = replace(subject, model=torch.compile(subject.model)) if compiled else subject
        self.optimizer = torch.optim.SGD(_trainable(subject), lr=lr)
        self._draws = torch.Generator().manual_seed(0)
        self._leaves, self._tree = tree_flatten((subject.x, subject.y))

    def step(self) -> Batch:
        """Take one step."""
        index_B = torch.randperm(len(self._leaves[0]), generator=self._draws)[: self.rows]
        x, y = tree_unflatten([leaf[index_B.to(leaf.device)] for leaf in self._leaves], self._tree)
        self._called.loss(x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Batch(x, y, torch.zeros(self.rows, dtype=torch.bool))


class Private:
    """Training with dpshard on one micro-batch a step."""

    def __init__(
        self,
        subject: Subject,
        privacy: Privacy,
        *,
        rows: int | None = None,
        lr: float = LEARNING_RATE,
        compiled: bool = False,
    ):
        self.subject = subject
        rows = rows or subject.rows
        leaves, self._tree = tree_flatten((subject.x, subject.y))
        dataset = TensorDataset(*leaves)
        if compiled:
            subject.model.compile()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "noise_multiplier=0|target_delta")
            self.engine = PrivacyEngine(
                subject.model,
                batch_size=expected_batch(rows),
                sample_size=len(dataset),
                steps=STEPS,
                max_batch_size=rows,
                clipping_fn="abadi",
                target_delta=1e-5,
                **asdict(privacy),
            )
        self.optimizer = torch.optim.SGD(_trainable(subject), lr=lr)
        self._batches: Iterator[Any] = self.engine.batches(dataset, micro_batch_size=rows)

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Parameter names by clipping group."""
        return self.engine.mechanism.clipping_groups

    def verify(self) -> None:
        """Compare with plain autograd, or raise VerificationError."""
        x, loss_fn = self.subject.x, self.subject.loss_fn
        args, kwargs = ((), x) if isinstance(x, Mapping) else (x if isinstance(x, tuple) else (x,), {})
        leaves, tree = tree_flatten(self.subject.y)
        self.engine.verify(
            *args,
            loss_fn=lambda output, *found: loss_fn(output, tree_unflatten(list(found), tree)),
            targets=tuple(leaves),
            **kwargs,
        )

    def step(self) -> Batch:
        """Take one step."""
        logical_batch, taken = next(self._batches), []
        for leaves in logical_batch:
            x, y = tree_unflatten(list(leaves), self._tree)
            self.subject.loss(x, y).backward()
            taken.append(Batch(x, y, logical_batch.is_padding))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return taken[0]


def _trainable(subject: Subject) -> list[torch.nn.Parameter]:
    return [p for p in subject.model.parameters() if p.requires_grad]
