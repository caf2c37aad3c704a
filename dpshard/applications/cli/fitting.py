"""Defaults for open settings; only the kind and the size of the data decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpshard.accounting import SampledMechanism
from dpshard.applications.cli import correlated, models
from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.settings import TrainSettings
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError
from dpshard.recipes import DP_BERT

LARGEST_BATCH = 256
"""Expected batch size on data with over twice as many samples."""
LEARNING_RATES = {"sgd": 0.5, "adam": 0.003, "adamw": 0.003, "dp-bert": DP_BERT.learning_rate}
EPOCHS = 10.0
LARGEST_TABLE_BATCH, TABLE_STEPS = 4096, 300
"""Largest batch and number of steps for tables, as `dpshard advise` recommends."""
TABLE_RATES = {Kind.FEATURES: 0.03, Kind.NUMBERS: 0.01}
"""Learning rates of adamw for tables, as in docs/tables.md."""
LARGEST_PRETRAINING_BATCH = 4096
"""Expected batch size of pre-training on data with over four times as many samples."""


def fit(settings: TrainSettings, data: Data) -> TrainSettings:
    """Return `settings` without gaps: model, batch size, optimizer, learning rate, and bands."""
    samples = len(data.train)
    if settings.objective == "masked" and data.kind is not Kind.MASKED:
        raise ConfigurationError(
            f"objective='masked' needs texts without labels, but the data are others ({data.sample}): take --task "
            f"pydoc, or --data with a text column and no label column."
        )
    model = models.choose(data, settings.task) if settings.model == "auto" else settings.model
    models.require_fits(model, data)
    optimizer = settings.optimizer
    table = data.kind in (Kind.FEATURES, Kind.NUMBERS)
    if optimizer == "auto":
        optimizer = "adam" if data.kind is Kind.TEXT else "adamw" if table else "sgd"
    batch_size, learning_rate = settings.batch_size, settings.learning_rate
    if batch_size is None and settings.phases is None and settings.recipe == "dp-bert" and settings.steps is not None:
        settings = replace(settings, phases=_growing(samples, settings.steps), steps=None)
    if batch_size is None and settings.phases is None:
        batch_size = min(LARGEST_TABLE_BATCH if table else LARGEST_BATCH, max(1, samples // 2))
    if settings.epochs is None and settings.steps is None and settings.phases is None:
        length = {"steps": TABLE_STEPS} if table else {"epochs": EPOCHS}
        settings = replace(settings, **length)
    if learning_rate is None:
        learning_rate = TABLE_RATES[data.kind] if table and optimizer == "adamw" else LEARNING_RATES[optimizer]
    settings = replace(settings, model=model, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate)
    run = mechanism(settings, data)
    if settings.bands != "auto":
        return settings
    names = (settings.sampling, settings.correlation, settings.bands, settings.correlation_momentum)
    budget: Any = {"target_epsilon": settings.target_epsilon, "target_delta": settings.target_delta}
    run = correlated.parse(run, *names, of_known_length=True, **budget)
    assert run.noise_correlation is not None  # else parse has raised
    return replace(settings, bands=str(run.noise_correlation.bands))


def mechanism(settings: TrainSettings, data: Data) -> SampledMechanism:
    """Return the run of fitted settings, still without noise and its correlation; refuse too large batches."""
    length: Any = {"epochs": settings.epochs, "steps": settings.steps, "sampling": settings.sampling}
    schedule = BatchSchedule.parse(settings.expected_batch_size(), sample_size=len(data.train), **length)
    earlier = () if data.fitted is None else data.fitted.earlier
    return SampledMechanism(schedule=schedule, sample_size=len(data.train), earlier=earlier)


def _growing(samples: int, steps: int) -> str:
    recipe = DP_BERT.scaled(steps=steps, last_batch=min(LARGEST_PRETRAINING_BATCH, max(1, samples // 4)))
    return ",".join(f"{size}x{count}" for size, count in recipe.engine_settings()["batch_size"])
