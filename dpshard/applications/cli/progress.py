"""The progress bar of a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from dpshard import PrivacyEngine
from dpshard.accounting import epsilon_of, rounded_up


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
        mechanism, every = self._engine.mechanism, self._evaluate_every
        releases = mechanism.releases(math.ceil(step / every) * every)
        return epsilon_of(releases, mechanism.target_delta, mechanism.accountant)

    def _of_target(self, epsilon: float) -> str:
        target = self._engine.mechanism.target_epsilon
        return rounded_up(epsilon, 3) + ("" if target is None else f" of {target:g}")
