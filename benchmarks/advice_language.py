"""Language models for the advice: pydoc, which compares, and a sweep on other texts, on which the advice stands.

[Note: Small batches stand for large ones]
With noise, the loss depends on model, steps and sigma/B, and not on the batch B alone: McKenna et al. 2025,
arXiv:2501.18914, who sweep at one physical batch. Here the noise of an update has norm sigma sqrt(d) / B, about 2, and
sampling adds at most 1 / sqrt(32). So the sweep takes batches of 32 with the sigma/B of large ones.
"""

from __future__ import annotations

import ast
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.advice import DELTA, Contest, Recipe, advised, command, first_guess, fit
from dpshard.accounting import SampledMechanism, calibrate
from dpshard.applications.cli.data import IGNORED, language
from dpshard.applications.cli.models import gpt
from dpshard.applications.cli.settings import resolve
from dpshard.applications.cli.tasks import load
from dpshard.config import BatchSchedule
from dpshard.losses import sample_losses

LENGTH, MODEL_WIDTH, DEPTH = 32, 32, 1
"""Bytes of a text; sizes of the GPT, with 22,048 parameters."""


def pydoc(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return texts of Python's documentation to train on, and a random fifth to test."""
    settings = resolve({"task": "pydoc", "max_length": LENGTH, "test_fraction": 0.0, "validation_fraction": 0.0})
    ids, targets = load(settings).train[:]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    held = len(ids) // 5
    test, train = order[:held], order[held:]
    return TensorDataset(ids[train], targets[train]), TensorDataset(ids[test], targets[test])


def perplexity(recipe: Recipe, train: TensorDataset, test: TensorDataset, seed: int) -> float:
    """Train a small GPT privately on `train`; return the perplexity of a byte of `test`."""
    torch.manual_seed(seed)
    model = gpt(LENGTH, MODEL_WIDTH, DEPTH)
    fit(model, recipe, train, lambda logits, y: sample_losses(logits, y, ignore_index=IGNORED).mean())
    x, y = test[:]
    with torch.no_grad():
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    return math.exp(loss)


PYDOC = Contest(
    task="language",
    split=pydoc,
    score=perplexity,
    unit="perplexities",
    contenders={"README": first_guess, "README's command": command, "advice": advised},
)

# --- the sweep: other texts, so that pydoc is not tuned on ------------------------------------------------------------

SAMPLES, HELD, PHYSICAL_BATCH = 2000, 500, 32
EPSILONS = (1.0, 3.0, 8.0)
SHORT, STEPS = 100, 300
RATES = {"adam": (0.003, 0.01, 0.03), "sgd": (0.5,)}
"""Learning rates of Adam, and of SGD with momentum 0.9; all fall along a cosine."""
RELATIVE_NOISE = {"large": 1.05, "small": 2.0}
"""Noise over batch, relative to a batch of all samples, of large and of small batches."""


def corpora() -> dict[str, list[str]]:
    """Return texts of Python's standard library: docstrings, and bodies of functions."""
    prose, code = set(), set()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if path.parent.name in ("site-packages", "test", "pydoc_data"):
            continue
        source = path.read_text("utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                prose.add(" ".join((ast.get_docstring(node) or "").split()))
                code.add(ast.unparse(node.body[-1]))
    rows = np.random.default_rng(0)
    return {
        name: rows.permutation(sorted(found - {""}))[: SAMPLES + HELD].tolist()
        for name, found in (("docstrings", prose), ("code", code))
    }


def sweep(advance: Callable[[str], None], *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return a run for each corpus, cell, optimizer and learning rate."""
    found = []
    settings = resolve({"task": "pydoc", "max_length": LENGTH})
    for corpus, texts in corpora().items():
        rows = language(texts, settings)[:]
        train, test = (TensorDataset(*(part[own] for part in rows)) for own in (slice(SAMPLES), slice(SAMPLES, None)))
        for epsilon, steps, batch in cells(tiny=tiny):
            ratio = RELATIVE_NOISE[batch] * _least_noise(epsilon, steps)
            engine = {"batch_size": PHYSICAL_BATCH, "sample_size": SAMPLES, "steps": steps, "clipping_fn": "automatic"}
            engine |= {"noise_multiplier": ratio * PHYSICAL_BATCH, "target_delta": DELTA}
            for optimizer, rate in rates(tiny=tiny):
                recipe = Recipe(engine=engine, optimizer=optimizer, learning_rate=rate, momentum=0.9, cosine=True)
                facts = {"corpus": corpus, "epsilon": epsilon, "steps": steps, "batch": batch}
                begun = time.perf_counter()
                score = perplexity(recipe, train, test, seed=0)
                facts |= {"optimizer": optimizer, "learning_rate": rate, "perplexity": score}
                found.append(facts | {"noise_over_batch": ratio, "seconds": time.perf_counter() - begun})
                advance(f"{corpus}, epsilon {epsilon:g}")
    return found


def _least_noise(epsilon: float, steps: int) -> float:
    """Return sigma/B of batches of all samples."""
    run = SampledMechanism(schedule=BatchSchedule((SAMPLES,)), sample_size=SAMPLES)
    alone = calibrate(run, target_epsilon=epsilon, target_delta=DELTA, accountant="rdp").noise_multiplier
    return alone * math.sqrt(steps) / SAMPLES  # Gaussian steps about all samples compose to one


def cells(*, tiny: bool = False) -> list[tuple[float, int, str]]:
    """Return epsilon, steps and batch of each cell; short runs and small batches at one epsilon."""
    found = [(3.0, SHORT, "large"), *product(EPSILONS, [STEPS], ["large"]), (3.0, STEPS, "small")]
    return [(EPSILONS[0], 10, "large")] if tiny else found


def rates(*, tiny: bool = False) -> Iterator[tuple[str, float]]:
    """Yield optimizers and learning rates."""
    for optimizer, values in RATES.items():
        yield from product([optimizer], values[:1] if tiny else values)


def runs_of_the_sweep(*, tiny: bool = False) -> int:
    """Return the number of runs."""
    return 2 * len(cells(tiny=tiny)) * len(list(rates(tiny=tiny)))


def summary(runs: list[dict[str, Any]]) -> list[tuple[float, str, float, int, str, float]]:
    """Return the geometric mean of perplexities over texts, by epsilon and setting, the best first."""
    names = ("optimizer", "learning_rate", "steps", "batch")
    found: dict[Any, list[float]] = {}
    for run in runs:
        found.setdefault((run["epsilon"], *(run[name] for name in names)), []).append(math.log(run["perplexity"]))
    return sorted(((*key, math.exp(mean(logs))) for key, logs in found.items()), key=lambda row: (row[0], row[-1]))
