"""Does the advice beat the README's first guess? And the sweep behind the advice on tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine, advise
from dpshard.accounting import SampledMechanism, calibrate
from dpshard.applications.cli.settings import resolve
from dpshard.config import BatchSchedule

WIDTH = 128
"""Of the hidden layer: the README's network, for both contenders."""
EPSILON, DELTA = 3.0, 1e-5

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a run except its data."""

    engine: dict[str, Any]
    optimizer: str
    learning_rate: float
    momentum: float = 0.0
    cosine: bool = False


def first_guess(samples: int, _task: str) -> Recipe:
    """Return the README's settings, with a batch of all samples where they are fewer than its 512."""
    engine = {"batch_size": min(512, samples), "epochs": 20, "target_epsilon": EPSILON, "target_delta": DELTA}
    return Recipe(engine={"sample_size": samples, **engine}, optimizer="adamw", learning_rate=1e-2)


def command(samples: int, _task: str) -> Recipe:
    """Return the settings of `dpshard train --task pydoc`, a command of the README."""
    own = resolve({"task": "pydoc", "target_epsilon": EPSILON, "target_delta": DELTA})
    engine = {"sample_size": samples, "batch_size": own.batch_size, "epochs": own.epochs}
    engine |= {"target_epsilon": EPSILON, "target_delta": DELTA}
    assert own.learning_rate is not None
    return Recipe(
        engine=engine,
        optimizer=own.optimizer,
        learning_rate=own.learning_rate,
        momentum=own.momentum,
        cosine=own.lr_schedule == "cosine",
    )


def advised(samples: int, task: Any) -> Recipe:
    """Return the settings of `dpshard.advise`."""
    advice = advise(sample_size=samples, target_epsilon=EPSILON, target_delta=DELTA, task=task)
    return Recipe(
        engine=advice.engine_arguments(),
        optimizer=advice.optimizer,
        learning_rate=advice.learning_rate,
        momentum=advice.momentum,
        cosine=advice.lr_schedule == "cosine",
    )


Contender = Callable[[int, str], Recipe]
CONTENDERS: dict[str, Contender] = {"README": first_guess, "advice": advised}


def digits() -> Rows:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16).float(), torch.tensor(labels)


def breast_cancer() -> Rows:
    """Return the columns divided by their public bounds, and the classes."""
    from sklearn.datasets import load_breast_cancer

    columns, labels = load_breast_cancer(return_X_y=True)
    low, high = columns.min(0), columns.max(0)  # scikit-learn's description of the data set publishes both
    return torch.tensor((columns - low) / (high - low)).float(), torch.tensor(labels)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A data set, on which contenders meet."""

    task: str
    split: Callable[[int], tuple[Any, Any]]
    """Returns training and test samples of a seed."""
    score: Callable[[Recipe, Any, Any, int], float]
    unit: str
    """Of the score."""
    contenders: dict[str, Contender]


def compare(
    contests: dict[str, Contest], seeds: int, advance: Callable[[str], None], found: dict[str, Any]
) -> dict[str, Any]:
    """Return the scores of all contenders on each data set, a split and a start per seed, in turns; others stay."""
    for name, contest in contests.items():
        scores: dict[str, list[float]] = {contender: [] for contender in contest.contenders}
        for seed, (contender, recipe) in product(range(seeds), contest.contenders.items()):
            train, test = contest.split(seed)
            scores[contender].append(contest.score(recipe(len(train), contest.task), train, test, seed))
            advance(f"{name}, {contender}")
        found = found | {name: {contender: _spread(contest.unit, values) for contender, values in scores.items()}}
    return {"epsilon": EPSILON, "delta": DELTA, "data": found}


def _spread(unit: str, values: list[float]) -> dict[str, Any]:
    return {unit: values, "mean": mean(values), "deviation": stdev(values) if len(values) > 1 else 0.0}


def table_split(rows: Callable[[], Rows]) -> Callable[[int], tuple[TensorDataset, TensorDataset]]:
    """Return a function of a seed that holds out a fifth of the rows."""

    def split(seed: int) -> tuple[TensorDataset, TensorDataset]:
        x, y = rows()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held, kept = order[: len(x) // 5], order[len(x) // 5 :]
        return TensorDataset(x[kept], y[kept]), TensorDataset(x[held], y[held])

    return split


def accuracy(recipe: Recipe, train: TensorDataset, test: TensorDataset, seed: int) -> float:
    """Train the network privately on `train`; return the share of `test` that is right."""
    torch.manual_seed(seed)
    (x, y), (x_test, y_test) = train[:], test[:]
    classes = 1 + int(max(y.max(), y_test.max()))
    model = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))
    fit(model, recipe, train, F.cross_entropy)
    with torch.no_grad():
        return float((model(x_test).argmax(1) == y_test).float().mean())


TABLES_OF = {"digits": digits, "breast_cancer": breast_cancer}
CONTESTS = {
    name: Contest(task="tabular", split=table_split(rows), score=accuracy, unit="accuracies", contenders=CONTENDERS)
    for name, rows in TABLES_OF.items()
}


def fit(model: nn.Module, recipe: Recipe, dataset: TensorDataset, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Train `model` privately; `loss` is a mean over samples."""
    engine = PrivacyEngine(model, **recipe.engine)
    optimizer = _optimizer(model, recipe)
    steps, depth = engine.steps, 0.5 if recipe.cosine else 0.0
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - depth * (1 - math.cos(math.pi * t / steps)))
    for logical_batch in engine.batches(dataset, min(128, 3 * recipe.engine["batch_size"] // 2)):
        for x_B, y_B in logical_batch:
            loss(model(x_B), y_B).backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    engine.detach()


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), recipe.learning_rate, momentum=recipe.momentum)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    return make(model.parameters(), recipe.learning_rate)


# --- the sweep: synthetic tables, so that no data set of the comparison is tuned on ---------------------------------

TABLES = ((400, 30, 2), (1500, 64, 10), (2000, 20, 2), (6000, 40, 5))
"""Samples, columns and classes."""
EPSILONS = (1.0, 3.0, 8.0)
STEPS = (30, 100, 300)
RATES = {"sgd": (0.1, 0.3, 1.0, 3.0), "adamw": (0.01, 0.03)}
"""Learning rates of SGD with momentum 0.9, and of AdamW; both fall along a cosine."""


def sweep(advance: Callable[[str], None], *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return a run for each table, epsilon, length, optimizer and learning rate, at batches of half of the samples."""
    found = []
    for samples, columns, classes in TABLES[:1] if tiny else TABLES:
        train, test = table(samples, columns, classes)
        for epsilon, steps in product(EPSILONS[:1] if tiny else EPSILONS, STEPS[:1] if tiny else STEPS):
            schedule = BatchSchedule((samples // 2,) * steps)
            run = SampledMechanism(schedule=schedule, sample_size=samples)
            sigma = calibrate(run, target_epsilon=epsilon, target_delta=DELTA, accountant="rdp").noise_multiplier
            engine = {"batch_size": samples // 2, "sample_size": samples, "steps": steps, "noise_multiplier": sigma}
            for optimizer, rate in _rates():
                recipe = Recipe(engine=engine, optimizer=optimizer, learning_rate=rate, momentum=0.9, cosine=True)
                facts = {"samples": samples, "columns": columns, "classes": classes, "epsilon": epsilon, "steps": steps}
                begun = time.perf_counter()
                score = accuracy(recipe, train, test, seed=0)
                facts |= {"optimizer": optimizer, "learning_rate": rate, "accuracy": score}
                found.append(facts | {"seconds": time.perf_counter() - begun})
                advance(f"{samples} x {columns}, epsilon {epsilon:g}")
    return found


def _rates() -> Iterator[tuple[str, float]]:
    for optimizer, rates in RATES.items():
        yield from product([optimizer], rates)


def runs_of_the_sweep(*, tiny: bool = False) -> int:
    """Return the number of runs."""
    cells = 1 if tiny else len(TABLES) * len(EPSILONS) * len(STEPS)
    return cells * sum(map(len, RATES.values()))


def table(samples: int, columns: int, classes: int) -> tuple[TensorDataset, TensorDataset]:
    """Return a synthetic table and 2,000 held-out rows, scaled to [0, 1] by fixed bounds."""
    from sklearn.datasets import make_classification

    features, labels = make_classification(
        samples + 2000, columns, n_informative=max(4, columns // 3), n_redundant=columns // 4, n_classes=classes,
        n_clusters_per_class=1 if classes > 4 else 2, class_sep=1.5, random_state=samples + columns,
    )  # fmt: skip
    x, y = torch.tensor(np.clip(features / 8 + 0.5, 0, 1)).float(), torch.tensor(labels)
    return TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:])


def summary(runs: list[dict[str, Any]]) -> list[tuple[str, float, int, float]]:
    """Return the mean accuracy over tables and epsilons by optimizer, learning rate and steps, the best first."""
    keys = {(run["optimizer"], run["learning_rate"], run["steps"]) for run in runs}
    means = [
        (*key, mean(r["accuracy"] for r in runs if (r["optimizer"], r["learning_rate"], r["steps"]) == key))
        for key in keys
    ]
    return sorted(means, key=lambda row: -row[-1])
