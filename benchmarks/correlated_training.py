"""Does correlated noise pay in training? Two small tasks with it and without it, at equal epsilon and equal steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.accounting import SampledMechanism, calibrate
from dpshard.accounting.mechanism import independent_error
from dpshard.applications.cli import correlated
from dpshard.config import BatchSchedule

EPSILONS, EPOCHS, SEEDS = (1.0, 3.0, 8.0), (1, 4), 5
DELTA, MOMENTUM = 1e-5, 0.9
MECHANISMS: dict[str, tuple[str, str | None]] = {
    "DP-SGD": ("poisson", None),
    "BISR": ("fixed-order", "banded-inverse"),
    "BandMF": ("cyclic-poisson", "band-mf"),
}
"""Sampling and `--correlation`; the number of bands is that of `--bands auto`."""
TUNING_SEED = 1000
VOCABULARY, LENGTH = 128, 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how it is scored; learning rates are chosen on the validation samples."""

    train: TensorDataset
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int
    rates: tuple[float, ...]
    build: Callable[[], nn.Module]
    score: Callable[[Tensor, Tensor], Tensor]
    """Takes logits [B, ..., C] and targets [B, ...]."""
    best: Callable[..., Any]
    """max or min, of scores."""


class ByteModel(nn.Module):
    """Logits of the next byte, from the six bytes before it (Bengio et al. 2003)."""

    def __init__(self, width: int = 64, context: int = 6) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Conv1d(16, width, context)
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return logits [B, T, VOCABULARY]."""
        x_BDT = F.pad(self.bytes(ids_BT).mT, (self.context - 1, 0))
        return self.head(torch.relu(self.hidden(x_BDT)).mT)


def pydoc() -> Task:
    """Return the language model: 8,192 pieces of Python's documentation, of 17 bytes."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics)).encode("ascii", "replace")
    pieces = torch.tensor(list(text[: len(text) // (LENGTH + 1) * (LENGTH + 1)])).view(-1, LENGTH + 1)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    x, y = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
    return _task(
        x, y, sizes=(8192, 2000), batch_size=128, rates=(0.05, 0.15, 0.4, 1.0), build=ByteModel, best=min,
        score=lambda logits_BTV, y_BT: F.cross_entropy(logits_BTV.mT, y_BT),
    )  # fmt: skip


def digits() -> Task:
    """Return the linear classifier of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]

    def build() -> nn.Module:
        model = nn.Linear(64, 10)
        nn.init.zeros_(model.weight)
        return model

    return _task(
        x, y, sizes=(1200, 237), batch_size=32, rates=(0.05, 0.2, 0.8, 2.0), build=build, best=max,
        score=lambda logits_BC, y_B: (logits_BC.argmax(1) == y_B).float().mean(),
    )  # fmt: skip


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "pydoc": pydoc}


def _task(x: Tensor, y: Tensor, *, sizes: tuple[int, int], **facts: Any) -> Task:
    begin, end = sizes[0], sum(sizes)
    return Task(
        train=TensorDataset(x[:begin], y[:begin]),
        validation=(x[begin:end], y[begin:end]),
        test=(x[end : end + 4000], y[end : end + 4000]),
        **facts,
    )


def runs(*, tiny: bool) -> int:
    """Return the number of trainings of `compare`."""
    settings = len(TASKS) * len(MECHANISMS) * (1 if tiny else len(EPSILONS) * len(EPOCHS))
    return settings * (_tried(tiny=tiny) + (2 if tiny else SEEDS))


def _tried(*, tiny: bool) -> int:
    return 1 if tiny else 4


def compare(on_run: Callable[[str], object], *, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the scores of each task, epsilon, number of epochs and mechanism.

    A learning rate is chosen with another seed, on validation samples. Calls `on_run` after each training.
    """
    seeds = range(2 if tiny else SEEDS)
    settings = product(TASKS, EPSILONS[-1:] if tiny else EPSILONS, EPOCHS[:1] if tiny else EPOCHS)
    for name, epsilon, epochs in settings:
        task = TASKS[name]()
        rates = task.rates[-_tried(tiny=tiny) :]
        for mechanism, (sampling, correlation) in MECHANISMS.items():
            run = planned(task, epsilon, epochs, sampling, correlation)
            tuned, scores = [], []
            for rate in rates:
                tuned.append(train(task, run, rate, TUNING_SEED, task.validation))
                on_run(f"{name}, epsilon {epsilon:g}, {mechanism}")
            rate = rates[tuned.index(task.best(tuned))]
            for seed in seeds:
                scores.append(train(task, run, rate, seed, task.test))
                on_run(f"{name}, epsilon {epsilon:g}, {mechanism}")
            yield {
                "task": name, "epsilon": epsilon, "epochs": epochs, "mechanism": mechanism, "steps": run.schedule.steps,
                "bands": run.noise_correlation and run.noise_correlation.bands, "sigma": run.noise_multiplier,
                "error": error(run), "learning_rate": rate, "tuned": dict(zip(map(str, rates), tuned, strict=True)),
                "scores": scores, "mean": mean(scores), "deviation": stdev(scores),
            }  # fmt: skip


def error(run: SampledMechanism) -> float:
    """Return the root mean square noise in prefix sums over max_grad_norm."""
    if run.noise_correlation is None:
        return independent_error(run.noise_multiplier, run.schedule.steps)
    return run.error


def planned(task: Task, epsilon: float, epochs: float, sampling: str, correlation: str | None) -> SampledMechanism:
    """Return the mechanism of a run at this epsilon, as `dpshard train --bands auto` plans it."""
    samples = len(task.train)
    schedule = BatchSchedule((task.batch_size,) * round(epochs * samples / task.batch_size))
    budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": DELTA}
    run = correlated.parse(
        SampledMechanism(schedule=schedule, sample_size=samples),
        sampling,
        correlation,
        None if correlation is None else "auto",
        None,
        of_known_length=True,
        **budget,
    )
    return calibrate(run, **budget)


def train(task: Task, run: SampledMechanism, rate: float, seed: int, scored_on: tuple[Tensor, Tensor]) -> float:
    """Train with SGD and momentum; return the score. A seed gives the start; the engine draws its own secret."""
    torch.manual_seed(seed)
    model = task.build()
    engine = PrivacyEngine(
        model,
        batch_size=task.batch_size,
        sample_size=run.sample_size,
        steps=run.schedule.steps,
        noise_multiplier=run.noise_multiplier,
        target_delta=DELTA,
        sampling=run.sampling,
        noise_correlation=run.noise_correlation,
        verify=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    for logical_batch in engine.batches(task.train, task.batch_size):
        for x, y in logical_batch:
            logits = model(x)
            F.cross_entropy(logits.movedim(-1, 1), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    with torch.no_grad():
        return float(task.score(model(scored_on[0]), scored_on[1]))
