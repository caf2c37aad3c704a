"""A training run, which can stop and resume at any step.

[Note: Bit for bit]
Run secret and step key the batch; with the sums, they key the noise. Seed, step and micro-batch seed dropout. So a
resumed run repeats steps exactly. On other ranks it does not: sums round otherwise, and dropout differs. Those steps
are second releases, which the journal records and the ledger counts.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader

from dpshard import Checkpointer, PrivacyEngine
from dpshard.accounting import epsilon_of, rounded_up
from dpshard.applications.cli import fitting, models
from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.launch import STOP_SIGNALS, stop_requests
from dpshard.applications.cli.run_folder import RunFolder
from dpshard.applications.cli.settings import MAY_CHANGE, TrainSettings
from dpshard.applications.cli.sharding import Sharded, shard
from dpshard.backends.ranks import Ranks
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError
from dpshard.losses import sample_losses
from dpshard.recipes import warmup_quadratic_decay
from dpshard.sampling.packing import IGNORED


@dataclass
class Run:
    """Objects of a run."""

    settings: TrainSettings
    data: Data
    device: torch.device
    sharded: Sharded
    engine: PrivacyEngine
    scheduler: LambdaLR
    ranks: Ranks

    @classmethod
    def prepare(
        cls, settings: TrainSettings, data: Data, ranks: Ranks, wrap: Callable[[nn.Module], nn.Module] = lambda m: m
    ) -> Run:
        """Return a run before its first step."""
        settings, device = fitting.fit(settings, data), own_device(settings, ranks)
        sharded = shard(wrap(build_model(settings, data, device, ranks)), settings, device)
        facts: dict[str, Any] = {"sample_size": len(data.train), "rows_per_unit": data.rows_per_unit}
        if data.fitted is not None:
            facts["earlier"] = data.fitted.earlier
        engine = PrivacyEngine(sharded.model, **facts, **settings.mechanism())
        scheduler = make_scheduler(sharded.optimizer, settings, engine.steps)
        return cls(settings, data, device, sharded, engine, scheduler, ranks)

    def checkpointer(self, folder: RunFolder) -> Checkpointer:
        """Return the Checkpointer of this run in `folder`."""
        others = {"scheduler": self.scheduler, "settings": _Unchanged(folder, self.settings)}
        return Checkpointer(folder.checkpoints, self.engine, self.sharded.optimizer, **others)

    def train(self, folder: RunFolder, checkpoints: Checkpointer, console: Console) -> bool:
        """Take the steps that are left or in budget; return False if a signal stopped them."""
        engine, settings = self.engine, self.settings
        score_every = math.ceil(engine.steps / settings.evaluations)
        with blocked_signals():  # worker processes inherit the block
            batches = engine.batches(self.data.train, settings.micro_batch_size, num_workers=settings.num_workers)
        progress = TrainingProgress(console, engine, score_every)
        metrics: Any = nullcontext(lambda row: None)
        if self.ranks.first:
            metrics = folder.append_metrics(after_step=engine.step)
        with metrics as append, stop_requests() as stops, progress:
            started = time.perf_counter()
            for logical_batch in batches:
                row = {"step": logical_batch.step + 1, "learning_rate": self.scheduler.get_last_lr()[0]}
                try:
                    row |= {"loss": self.take_step(logical_batch)} | engine.metrics()
                except BudgetExceededError as error:  # repeated steps with other sums were counted
                    warnings.warn(f"The run ends here: {error}", stacklevel=2)
                    checkpoints.save()
                    return True
                row["samples_per_second"] = row["realised_batch_size"] / (time.perf_counter() - started)
                last = engine.step == engine.steps
                if engine.step % score_every == 0 or last:
                    row["epsilon"] = engine.epsilon()
                    row |= {f"validation_{name}": score for name, score in self.score(self.data.validation).items()}
                append(row)
                progress.show(row)
                stop = any(self.ranks.gather(bool(stops)))  # a signal may reach ranks at different steps
                if engine.step % settings.checkpoint_every == 0 or last or stop:
                    checkpoints.save()
                if stop:
                    return last
                started = time.perf_counter()
        return True

    def take_step(self, logical_batch: Any) -> float:
        """Take one step; return the mean of finite losses."""
        model = self.sharded.model
        model.train()
        for x, y, *weights in logical_batch:
            own = () if self.ranks.first else (self.ranks.rank,)  # for other dropout on each rank
            torch.manual_seed(draw_seed(self.settings.seed, logical_batch.step, logical_batch.position, *own))
            losses = sample_losses if self.data.objective is None else self.data.objective.losses
            losses_B = losses(model(x.to(self.device)), y.to(self.device))
            for weight_B in weights:  # of rows of units
                losses_B = losses_B * weight_B.to(self.device)
            losses_B.mean().backward()
            self.engine.record_loss(losses_B)
        self.sharded.step()
        self.scheduler.step()
        return self.engine.metrics().get("loss", math.nan)

    def score(self, split: Any) -> dict[str, float]:
        """Return loss and accuracy, and perplexity of tokens; of numbers, rmse and r2."""
        if len(split) == 0:
            return {}
        if self.data.kind is Kind.NUMBERS:
            return self._score_numbers(split)
        sums = torch.zeros(3, dtype=torch.float64)  # of losses, right answers, and 1
        for logits, y in self._outputs(split):
            logits, y = logits.flatten(0, -2), y.flatten()
            loss = F.cross_entropy(logits, y, reduction="sum", ignore_index=IGNORED)
            right, count = (logits.argmax(1) == y).sum(), (y != IGNORED).sum()
            sums += torch.tensor([float(loss), float(right), float(count)], dtype=torch.float64)
        loss, right, count = sum(self.ranks.gather(sums)).tolist()  # type: ignore[union-attr]
        scores = {"loss": loss / max(1, count), "accuracy": right / max(1, count)}
        if self.data.kind is Kind.LANGUAGE:
            scores["perplexity"] = float(torch.tensor(scores["loss"]).exp())
        return scores

    def _score_numbers(self, split: Any) -> dict[str, float]:
        objective = self.data.objective
        sums = torch.zeros(4, dtype=torch.float64)  # of 1, errors, y and y squared, y in [-1, 1]
        for outputs, y in self._outputs(split):
            errors_B, y = objective.losses(outputs, y).double().cpu(), y.cpu()
            sums += torch.stack([torch.ones_like(y).sum(), errors_B.sum(), y.sum(), y.square().sum()])
        count, error, total, squares = sum(self.ranks.gather(sums)).tolist()  # type: ignore[union-attr]
        variance = squares / count - (total / count) ** 2
        rmse = math.sqrt(error / count) * (objective.high - objective.low) / 2
        return {"loss": error / count, "rmse": rmse, "r2": 1 - error / count / variance if variance > 0 else 0.0}

    def _outputs(self, split: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's outputs and targets; all ranks run the model equally often."""
        model = self.sharded.model
        model.eval()
        own, real = _own_batches(len(split), self.settings.micro_batch_size, self.ranks)
        for counts, (x, y) in zip(real, DataLoader(split, batch_sampler=own), strict=True):
            with torch.no_grad():
                outputs = model(x.to(self.device))
            if counts:
                yield outputs, y.to(self.device)


def _own_batches(samples: int, batch_size: int, ranks: Ranks) -> tuple[list[list[int]], list[bool]]:
    """Return this rank's batches, equally many on all, and which of them count."""
    batches = list(BatchSampler(range(samples), batch_size, drop_last=False))
    numbers = range(ranks.rank, math.ceil(len(batches) / ranks.size) * ranks.size, ranks.size)
    return [batches[i % len(batches)] for i in numbers], [i < len(batches) for i in numbers]


@dataclass(frozen=True)
class _Unchanged:
    """Refuses checkpoints of other settings."""

    folder: RunFolder
    settings: TrainSettings

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.settings).items() if name not in MAY_CHANGE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # An earlier version saved no settings that came later; it trained with their defaults.
        own, saved = self.state_dict(), asdict(TrainSettings()) | state_dict
        changed = sorted(key for key in own.keys() | state_dict.keys() if own.get(key) != saved.get(key))
        if changed:
            raise CheckpointError(
                f"The checkpoints in {self.folder.path} belong to a run with other settings "
                f"({', '.join(changed)}): restore {self.folder.config.name}, or start a new run."
            )


def build_model(settings: TrainSettings, data: Data, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the model of fitted settings, equal on all ranks."""
    torch.manual_seed(settings.seed)
    model = models.build(settings.model, data, settings).to(device)
    models.require_equal(model, settings.model, ranks)
    return model


def make_scheduler(optimizer: Optimizer, settings: TrainSettings, steps: int) -> LambdaLR:
    """Return the learning-rate schedule of the settings."""
    if settings.lr_schedule == "quadratic":
        return warmup_quadratic_decay(optimizer, warmup_steps=3 * steps // 8, steps=steps)
    # A cosine from 1 to 0, or 1 throughout.
    depth = 0.5 if settings.lr_schedule == "cosine" else 0.0
    return LambdaLR(optimizer, lambda step: 1 - depth * (1 - math.cos(math.pi * step / steps)))


def pick_device(name: str) -> torch.device:
    """Return the device `name`; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device={name!r} cannot be used here: {error}") from error


def own_device(settings: TrainSettings, ranks: Ranks) -> torch.device:
    """Return the device of the settings, or the rank's own GPU."""
    device = pick_device(settings.device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and not ranks.alone else device


def draw_seed(*key: int) -> int:
    """Return PyTorch's seed under `key`; see [Note: Bit for bit]."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block STOP_SIGNALS in children that start within."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class TrainingProgress(Progress):
    """A bar; without a terminal, a line per evaluation. Epsilon between evaluations is an upper bound."""

    def __init__(self, console: Console, engine: PrivacyEngine, evaluate_every: int) -> None:
        loss, spent = "loss {task.fields[loss]}", "[bold]ε {task.fields[epsilon]}[/]"
        texts = (loss, spent, "{task.fields[speed]} samples/s", "ETA")
        bar = (SpinnerColumn(), TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24))
        columns = (*bar, *map(TextColumn, texts), TimeRemainingColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._engine, self._evaluate_every = engine, evaluate_every
        self._samples, self._started = 0.0, time.perf_counter()
        start = {"total": engine.steps, "completed": engine.step, "loss": "–", "speed": "–"}
        self._step = self.add_task("step", epsilon=self._of_target(engine.epsilon()), **start)

    def show(self, row: Mapping[str, float]) -> None:
        """Show a step; `row` has "epsilon" only at evaluations."""
        step = int(row["step"])
        spent = self._of_target(row["epsilon"]) if "epsilon" in row else f"≤ {self._of_target(self._bound(step))}"
        self._samples += row["realised_batch_size"]
        speed = f"{self._samples / (time.perf_counter() - self._started):,.0f}"
        self.update(self._step, completed=step, loss=f"{row['loss']:.3f}", epsilon=spent, speed=speed)
        scores = [f"{name.replace('_', ' ')} {row[name]:.4g}" for name in row if name.startswith("validation_")]
        if scores and not self.console.is_terminal:
            line = [f"step {step}/{self._engine.steps}", f"loss {row['loss']:.3f}", f"ε {spent}", *scores]
            self.console.print("  ".join(line))

    def _bound(self, step: int) -> float:
        if self._engine.internals.has_extra_releases:
            return self._engine.epsilon()
        mechanism, every = self._engine.mechanism, self._evaluate_every
        releases = mechanism.releases(math.ceil(step / every) * every)
        return epsilon_of(releases, mechanism.target_delta, mechanism.accountant)

    def _of_target(self, epsilon: float) -> str:
        target = self._engine.mechanism.target_epsilon
        return rounded_up(epsilon, 3) + ("" if target is None else f" of {target:g}")
