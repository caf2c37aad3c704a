"""Protect users instead of rows, in both ways of Charles et al. (2024), at equal epsilon and equal compute.

    python user_level.py

A made-up population: every user has 16 rows, whose features are shifted by a habit of that user. `habits` says how
large the shift is beside the spread of rows. Drawing users clips the mean gradient of G rows of a user; drawing rows
clips each row, and the noise covers at most G rows of a user (`dpshard account --max-rows-per-unit G`). The table
gives the share of right answers for users that no run has seen, averaged over seeds. docs/recipes.md reads it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from dpshard import PrivacyEngine, UnitDataset
from dpshard.accounting import MechanismOfUnits, calibrate
from dpshard.config import BatchSchedule

ROWS, FEATURES, CLASSES = 16, 16, 4
DELTA = 1e-5


def population(users: int, habits: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, labels and the user of every row."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, CLASSES, (users, ROWS), generator=generator)
    habit = habits * torch.randn(users, 1, FEATURES, generator=generator)
    x = centres[labels] + habit + 1.5 * torch.randn(users, ROWS, FEATURES, generator=generator)
    return x.flatten(0, 1), labels.flatten(), torch.arange(users).repeat_interleave(ROWS)


def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@functools.cache
def noise_for_rows(rows: int, batch: int, steps: int, G: int, epsilon: float) -> float:
    """Return sigma for drawing rows, at most G of a user: `dpshard account --max-rows-per-unit G`."""
    plan = MechanismOfUnits(schedule=BatchSchedule((batch,) * steps), sample_size=rows, max_rows_per_unit=G)
    return calibrate(plan, target_epsilon=epsilon, target_delta=DELTA).noise_multiplier


def run(way: str, G: int, habits: float, epsilon: float, seed: int, *, users: int, batch: int, steps: int) -> float:
    """Return the share of right answers after a run over `batch` users, or batch * G rows, a step."""
    torch.manual_seed(seed)
    x, y, user = population(users, habits, torch.Generator().manual_seed(seed + 1))
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    rows = TensorDataset(x, y)
    if way == "users":
        engine = PrivacyEngine(
            model,
            batch_size=batch,
            sample_size=users,
            steps=steps,
            target_epsilon=epsilon,
            target_delta=DELTA,
            rows_per_unit=G,
        )
        batches = engine.batches(UnitDataset(rows, user, G), 2 * batch)
    else:
        kept = [i for i in range(len(user)) if i % ROWS < G]  # at most G rows of a user
        sigma = noise_for_rows(len(kept), batch * G, steps, G, epsilon)
        engine = PrivacyEngine(
            model, batch_size=batch * G, sample_size=len(kept), steps=steps, noise_multiplier=sigma, target_delta=DELTA
        )
        batches = engine.batches(Subset(rows, kept), 2 * batch * G)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for logical_batch in batches:
        for x_B, y_B, *weights in logical_batch:
            losses = F.cross_entropy(model(x_B), y_B, reduction="none")
            (losses * weights[0] if weights else losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    unseen, answers, _ = population(500, habits, torch.Generator().manual_seed(10_000))
    return score(model, unseen, answers)


def main(
    *, users: int = 600, batch: int = 100, steps: int = 40, seeds: int = 3, rows: tuple[int, ...] = (1, 4, 16)
) -> dict[tuple[float, float, int], tuple[float, float]]:
    """Print and return, by epsilon, habits and G, the scores of drawing users and of drawing rows."""
    warnings.simplefilter("ignore")
    found = {}
    print("| epsilon | habits | G | users are drawn | rows are drawn |\n|---:|---:|---:|---:|---:|")
    for epsilon, habits, G in itertools.product((0.5, 2.0), (0.0, 2.0), rows):
        drawn, sampled = (
            mean(run(way, G, habits, epsilon, seed, users=users, batch=batch, steps=steps) for seed in range(seeds))
            for way in ("users", "rows")
        )
        found[epsilon, habits, G] = drawn, sampled
        print(f"| {epsilon:g} | {habits:g} | {G} | {drawn:.1%} | {sampled:.1%} |", flush=True)
    return found


if __name__ == "__main__":
    main()
