"""A start with its reasons."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dpshard.applications import user_code
from dpshard.applications.advice import paste
from dpshard.applications.advice.starts import (
    ACCOUNTANT,
    BU,
    DE,
    LI,
    MCKENNA,
    PAPERNOT,
    STARTS,
    SWEEP,
    OptimizerName,
    Reason,
    Start,
    Task,
)
from dpshard.applications.advice.trade_offs import Target, TradeOff, smallest_within, trade_offs
from dpshard.config import BatchSchedule, ClippingStyle, require_choice, require_delta, require_positive
from dpshard.errors import ConfigurationError

LARGEST_DELTA = 1e-5
FEWEST_STEPS = 30
"""Fewest steps of a run; with fewer, the batch is made smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A start; `PrivacyEngine(model, **advice.engine_arguments())` takes it."""

    task: Task
    model: str
    """A name of `dpshard train --model`, or package.module:function."""
    pretrained: bool
    sample_size: int
    target_epsilon: float
    target_delta: float
    batch_size: int
    """Expected batch size, by Poisson sampling."""
    steps: int
    noise_multiplier: float
    """Estimated noise multiplier; the engine calibrates its own."""
    max_grad_norm: float = 1.0
    clipping_fn: Literal["automatic"] = "automatic"
    clipping_style: ClippingStyle = "all-layer"
    optimizer: OptimizerName
    learning_rate: float
    momentum: float
    lr_schedule: Literal["cosine", "constant"]
    trains: str
    trade_offs: tuple[TradeOff, ...]
    samples_per_second: float | None
    reasons: tuple[Reason, ...]
    next_steps: tuple[str, ...]

    @property
    def epochs(self) -> float:
        """Expected passes."""
        return self.batch_size * self.steps / self.sample_size

    def engine_arguments(self) -> dict[str, Any]:
        """Return arguments of PrivacyEngine, except model."""
        return {name: getattr(self, name) for name in _ENGINE}

    def command(self) -> str:
        """Return the command of `dpshard train`, with a name for the user's data."""
        return paste.command(asdict(self))

    def code(self) -> str:
        """Return a Python program, on random data."""
        return paste.code(asdict(self))


_ENGINE = ("batch_size sample_size steps target_epsilon target_delta max_grad_norm clipping_fn clipping_style").split()


def advise(
    *,
    sample_size: int,
    target_epsilon: float,
    target_delta: float | None = None,
    task: Task = "tabular",
    model: str | None = None,
    pretrained: bool = False,
    hours: float | None = None,
    samples_per_second: float | None = None,
) -> Advice:
    """Return where to start a private run on `sample_size` training samples within a budget.

    `target_delta` defaults to a power of ten, at most 1e-5 and 1 / (2 sample_size). `model` is a name of `dpshard train
    --model`, or package.module:function; `pretrained` says that its weights are public. `hours` and
    `samples_per_second` limit the compute. Raises ConfigurationError for values out of range.
    """
    require_choice("task", task, get_args(Task))
    BatchSchedule.parse(1, sample_size=sample_size, steps=1)  # checks sample_size
    require_positive("target_epsilon", target_epsilon)
    delta = _default_delta(sample_size) if target_delta is None else target_delta
    require_delta(delta, sample_size)
    start = _start(task, pretrained)
    model = _model(start, task, model)
    limit = _limit(hours, samples_per_second)
    target = Target(sample_size, float(target_epsilon), delta)
    steps, rows, chosen, shortened = _fitting(start, target, limit)
    return Advice(
        task=task,
        model=model,
        pretrained=pretrained,
        sample_size=sample_size,
        target_epsilon=float(target_epsilon),
        target_delta=delta,
        batch_size=chosen.batch_size,
        steps=steps,
        noise_multiplier=chosen.noise_multiplier,
        optimizer=start.optimizer,
        learning_rate=start.learning_rate,
        momentum=start.momentum,
        lr_schedule=start.lr_schedule,
        trains=start.trains,
        trade_offs=rows,
        samples_per_second=samples_per_second,
        reasons=(*_reasons(start, chosen, given_delta=target_delta is not None), *shortened),
        next_steps=(*_more_compute(rows, chosen), *start.next_steps, _SEARCH),
    )


def _start(task: Task, pretrained: bool) -> Start:
    if (task, pretrained) not in STARTS:
        raise ConfigurationError(
            f"pretrained=True: no source says where a pre-trained {task} model starts. Leave it out, or take "
            f"task='vision' or task='language'."
        )
    return STARTS[task, pretrained]


def _model(start: Start, task: Task, model: str | None) -> str:
    if model is not None and user_code.is_path(model):
        return model
    if not start.models:
        raise ConfigurationError(
            f"pretrained=True, model={model!r}: name your function that returns the model with its public weights, "
            f"model='package.module:function'."
        )
    if model is not None and model not in start.models:
        raise ConfigurationError(
            f"model={model!r} is not for task={task!r}; choose one of {list(start.models)}, or name your own "
            f"function, 'package.module:function'."
        )
    return model or start.models[0]


def _default_delta(sample_size: int) -> float:
    return min(LARGEST_DELTA, 10.0 ** -math.ceil(math.log10(2 * sample_size)))


def _limit(hours: float | None, samples_per_second: float | None) -> int | None:
    if hours is None and samples_per_second is None:
        return None
    if samples_per_second is None:
        raise ConfigurationError(
            f"hours={hours!r} needs samples_per_second, the speed of private training: divide the samples of a step by "
            f"its seconds, which `dpshard bench` measures."
        )
    require_positive("samples_per_second", samples_per_second)
    if hours is None:
        return None
    require_positive("hours", hours)
    if hours * 3600 * samples_per_second < 1:
        raise ConfigurationError(f"hours={hours!r} is over before the first sample: allow more.")
    return int(hours * 3600 * samples_per_second)


def _fitting(
    start: Start, target: Target, limit: int | None
) -> tuple[int, tuple[TradeOff, ...], TradeOff, tuple[Reason, ...]]:
    rows = trade_offs(target, start.steps)
    chosen = smallest_within(rows, start.relative_noise)
    if limit is None or chosen.batch_size * start.steps <= limit:
        return start.steps, rows, chosen, ()
    steps = max(min(FEWEST_STEPS, limit), limit // chosen.batch_size)
    batch_size = min(chosen.batch_size, max(1, limit // steps))
    rows = trade_offs(target, steps, also=batch_size)
    chosen = next(row for row in rows if row.batch_size == batch_size)
    why = f"at equal compute, large batches beat many steps; batches shrink only at {FEWEST_STEPS} steps"
    return steps, rows, chosen, (Reason("hours", why, f"{LI}; the bound on steps: {SWEEP}"),)


def _reasons(start: Start, chosen: TradeOff, *, given_delta: bool) -> tuple[Reason, ...]:
    noise, *others = start.reasons
    so_far = f"noise per batch is {chosen.relative_noise:.2f} times that of a batch of all samples"
    delta = () if given_delta else (Reason("delta", "a power of ten of at most 1/(2N) and 1e-5", f"{LI}; {DE}"),)
    return (
        Reason("batch", f"{so_far}; {noise.why}", noise.source),
        *others,
        Reason("clipping", "automatic: the learning rate absorbs the threshold; published rates are for abadi", BU),
        Reason("style", "all-layer, one norm for all parameters: the sources' own", f"{DE}; {LI}"),
        Reason("table", "the loss depends on model, steps and sigma/batch; the table lists sigma/batch", MCKENNA),
        Reason("sigma", "the smallest that keeps the budget", ACCOUNTANT),
        *delta,
    )


def _more_compute(rows: tuple[TradeOff, ...], chosen: TradeOff) -> tuple[str, ...]:
    larger = [row for row in rows if row.batch_size > chosen.batch_size]
    if not larger:
        return ("More samples: sigma/batch falls as 1/N. Larger batches bring little.",)
    best, less = larger[-1], 1 - larger[-1].relative_noise / chosen.relative_noise
    return (
        f"A batch of {best.batch_size:,}: {best.epochs / chosen.epochs:.1f} times the compute, {less:.1%} less noise.",
    )


_SEARCH = f"Account for every run that you compare, discarded ones too: `dpshard account --search-runs` ({PAPERNOT})."
