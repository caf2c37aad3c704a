"""The cost of privacy for a user's model."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpshard.applications.benchmark.memory import in_fresh_process, peak_of
from dpshard.applications.benchmark.subject import Subject, load
from dpshard.applications.benchmark.timing import Spread, interleave, paired_ratio
from dpshard.applications.benchmark.training import NonPrivate, Privacy, Private, Training
from dpshard.applications.flops import FlopMeter
from dpshard.errors import ConfigurationError

DEFAULT_CLIPPINGS = (
    ("all-layer", "auto"),
    ("all-layer", "mixed-ghost"),
    ("block-wise", "auto"),
    ("layer-wise", "auto"),
    ("param-wise", "auto"),
)
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of step."""

    clipping: tuple[str, str] | None
    compiled: bool = False

    @property
    def label(self) -> str:
        """Name for users."""
        parts = ["not private"] if self.clipping is None else list(self.clipping)
        return ", ".join([*parts, "compiled"] if self.compiled else parts)

    def training(self, subject: Subject) -> Training:
        """Return a training of `subject`."""
        if self.clipping is None:
            return NonPrivate(subject, compiled=self.compiled)
        style, mode = self.clipping
        return Private(subject, Privacy(clipping_style=style, clipping_mode=mode), compiled=self.compiled)


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs of a step."""

    variant: Variant
    seconds: Spread
    ratio: Spread
    """Ratio of the time to that of the ordinary step in the same round."""
    flops: int
    peak: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Costs of all kinds of step; the ordinary step comes first."""

    rows: int
    parameters: int
    device: str
    measured: list[Measured]

    def baseline(self, measured: Measured) -> Measured:
        """Return the ordinary step for `measured`."""
        return self.find(Variant(None, measured.variant.compiled))

    def find(self, variant: Variant) -> Measured:
        """Return the costs of `variant`."""
        return next(m for m in self.measured if m.variant == variant)


def steps_of(clippings: Sequence[tuple[str, str]], rounds: int, *, compiled: bool, memory: bool) -> int:
    """Return how often `compare` calls `on_step`."""
    variants = (len(clippings) + 1) * (1 + compiled)
    return variants * (WARMUP + rounds + memory)


def compare(
    path: str,
    *,
    clippings: Sequence[tuple[str, str]] = DEFAULT_CLIPPINGS,
    rounds: int = 20,
    compiled: bool = False,
    memory: bool = True,
    on_step: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure the model of the function `path` (package.module:function) with and without privacy.

    Each peak is of a fresh process. Raises ConfigurationError if the function returns no parts of a Subject, and the
    engine's errors about the model.
    """
    make = load(path)
    variants = [
        Variant(clipping, c) for c in ((False, True) if compiled else (False,)) for clipping in (None, *clippings)
    ]
    subjects = [make() for _ in variants]
    if len({id(subject.model) for subject in subjects}) < len(subjects):
        raise ConfigurationError(f"{path} returned the same model twice: build a new one at every call.")
    trainings = {v.label: v.training(subject) for v, subject in zip(variants, subjects, strict=True)}
    if private := [training for training in trainings.values() if isinstance(training, Private)]:
        private[0].verify()
    steps = {label: training.step for label, training in trainings.items()}
    times = interleave(steps, rounds=rounds, warmup=WARMUP, on_step=on_step)
    flops = {v.clipping: _flops(trainings[v.label]) for v in variants if not v.compiled}
    first = subjects[0]
    parameters = sum(p.numel() for p in first.model.parameters() if p.requires_grad)
    comparison = Comparison(first.rows, parameters, str(first.device), [])
    del trainings, private, steps, subjects, first
    gc.collect()
    for variant in variants:
        peak = None
        if memory:
            peak = in_fresh_process(peak_of_variant, path, variant)
            on_step(variant.label)
        seconds, baseline = times[variant.label], times[Variant(None, variant.compiled).label]
        comparison.measured.append(
            Measured(variant, Spread.of(seconds), paired_ratio(seconds, baseline), flops[variant.clipping], peak)
        )
    return comparison


def peak_of_variant(path: str, variant: Variant) -> int:
    """Return peak bytes, in a fresh process."""
    warnings.simplefilter("ignore")
    make = load(path)
    x = torch.randn(4, 2)
    rehearsal = variant.training(Subject(nn.Linear(2, 2), x, x, nn.functional.mse_loss))
    rehearsal.step()  # loads code
    del rehearsal
    return peak_of(lambda: variant.training(make()).step)


def _flops(training: Training) -> int:
    with FlopMeter() as meter:
        training.step()
    return meter.flops


def advise(comparison: Comparison) -> list[str]:
    """Return sentences on style and mode."""
    private = [m for m in comparison.measured if m.variant.clipping is not None]
    fastest = min(private, key=lambda m: m.ratio.median * comparison.baseline(m).seconds.median)
    said = [f"Fastest: {fastest.variant.label} ({fastest.ratio.median:.2f} times the ordinary step)."]
    weighed = [m for m in private if m.peak is not None]
    if weighed:
        least = min(weighed, key=lambda m: m.peak or 0)
        share = (least.peak or 0) / max(1, comparison.baseline(least).peak or 0)
        said.append(f"Least memory: {least.variant.label} ({share:.2f} times that of the ordinary step).")
    modes: dict[str, dict[str, float]] = {}  # seconds by style and mode
    for m in private:
        style, mode = m.variant.clipping or ("", "")
        own = modes.setdefault(style, {})
        own[mode] = min(own.get(mode, math.inf), m.seconds.median)
    for style, seconds in modes.items():
        if len(seconds) > 1:
            said.append(f"Of the modes of {style}, {min(seconds, key=seconds.__getitem__)} is the fastest.")
    said.append(
        "Modes differ only in cost. Styles clip differently, so compare the accuracy of the model as well; all-layer "
        "clipping is the usual one."
    )
    return said
