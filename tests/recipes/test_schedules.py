"""Batch sizes and learning rates over a run, at the figures of the papers and at small ones."""

import pytest
import torch

from dpshard.errors import ConfigurationError
from dpshard.recipes import DP_BERT, stepped_batches, warmup_quadratic_decay


def test_the_schedule_of_dp_bert():
    """Anil et al. 2021, Sec. 5.2.2: 262K to 1M over 7.5K steps, 196K at a time, 14% fewer samples."""
    phases = DP_BERT.engine_settings()["batch_size"]
    assert phases == [(262144, 1500), (458752, 1500), (655360, 1500), (851968, 1500), (1048576, 14000)]
    assert sum(size * steps for size, steps in phases) == (1 - 0.140625) * 20_000 * 1_048_576


@pytest.mark.parametrize(
    ("arguments", "phases"),
    [
        ((10, 10, 1, 1, 1), [(10, 1)]),
        ((8, 32, 2, 4, 10), [(8, 2), (32, 8)]),
        ((8, 32, 3, 4, 10), [(8, 1), (20, 2), (32, 7)]),
        ((32, 8, 3, 3, 3), [(32, 1), (20, 1), (8, 1)]),
    ],
)
def test_levels_share_the_ramp(arguments, phases):
    first, last, levels, ramp_steps, steps = arguments
    assert stepped_batches(first, last, levels=levels, ramp_steps=ramp_steps, steps=steps) == phases


@pytest.mark.parametrize(
    "wrong", [(0, 8, 2, 4, 8), (8, 8, 0, 4, 8), (8, 8, 5, 4, 8), (8, 8, 2, 9, 8), (8, 8.0, 2, 4, 8)]
)
def test_impossible_schedules_are_refused(wrong):
    first, last, levels, ramp_steps, steps = wrong
    with pytest.raises(ConfigurationError, match="levels <= ramp_steps <= steps"):
        stepped_batches(first, last, levels=levels, ramp_steps=ramp_steps, steps=steps)


def test_the_learning_rate_rises_linearly_and_falls_quadratically():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_quadratic_decay(optimizer, warmup_steps=4, steps=8)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2 * (3 / 4) ** 2, 2 * (2 / 4) ** 2, 2 * (1 / 4) ** 2, 0.0, 0.0]
    for warmup_steps, steps in ((8, 8), (-1, 8), (0, 0), (1.0, 8)):
        with pytest.raises(ConfigurationError, match="warm-up ends before"):
            warmup_quadratic_decay(optimizer, warmup_steps=warmup_steps, steps=steps)


def test_a_scaled_recipe_keeps_its_shape():
    small = DP_BERT.scaled(steps=200, last_batch=512)
    assert small.warmup_steps == 75
    assert small.engine_settings()["batch_size"] == [(128, 15), (224, 15), (320, 15), (416, 15), (512, 140)]
    with pytest.raises(ConfigurationError, match="take 14 steps"):
        DP_BERT.scaled(steps=10, last_batch=512)
