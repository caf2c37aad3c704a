"""What a budget of epsilon and GPU-hours buys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpshard.applications.advice.trade_offs import Target
from dpshard.applications.planner.hardware import Hardware
from dpshard.config import is_count, require_positive, require_probability
from dpshard.errors import ConfigurationError

SIZES = (3e8, 1e9, 3e9, 1e10)
BATCHES = tuple(2**k for k in range(12, 21, 2))
SLOWER = 1.07
"""FLOPs of private over ordinary training."""
FEWEST_STEPS = 100
KEYS = ("epsilon", "delta", "gpu-hours", "dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """A budget."""

    epsilon: float
    delta: float
    gpu_hours: float
    sample_size: int
    seq: int = 1024

    def samples(self, parameters: float, hardware: Hardware) -> float:
        """Return the samples that a model sees, by 6 operations per parameter and token (Kaplan et al. 2020)."""
        return self.gpu_hours * 3600 * hardware.flops("bf16") / (SLOWER * 6 * parameters * self.seq)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run within the budget."""

    parameters: float
    batch_size: int
    steps: int
    noise_multiplier: float

    @property
    def noise_per_batch(self) -> float:
        """As in McKenna et al. 2025, arXiv:2501.18914."""
        return self.noise_multiplier / self.batch_size


def parse_means(text: str, seq: int | None = None) -> Means:
    """Parse `epsilon=2,delta=1e-10,gpu-hours=10000,dataset=1e9`, or raise ConfigurationError."""
    try:
        given = {key.strip(): float(value) for key, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        given = {}
    if sorted(given) != sorted(KEYS):
        raise ConfigurationError(f"--budget {text!r}: give epsilon=E,delta=D,gpu-hours=H,dataset=N, all four.")
    for key in ("epsilon", "gpu-hours", "dataset"):
        require_positive(f"--budget: {key}", given[key])
    require_probability("--budget: delta", given["delta"])
    if seq is not None and not is_count(seq):
        raise ConfigurationError(f"--seq {seq!r}: give the tokens of a sample, at least 1.")
    epsilon, delta, gpu_hours, samples = (given[key] for key in KEYS)
    return Means(epsilon=epsilon, delta=delta, gpu_hours=gpu_hours, sample_size=round(samples), seq=seq or 1024)


def frontier(means: Means, hardware: Hardware, report: Callable[[str], None] = lambda _: None) -> list[Point]:
    """Return the runs of at least FEWEST_STEPS steps."""
    points, ratio = [], 1.0
    target = Target(means.sample_size, means.epsilon, means.delta)
    for parameters in SIZES:
        samples = means.samples(parameters, hardware)
        for batch in BATCHES:
            steps = int(samples / batch)
            if batch > means.sample_size / 2 or steps < FEWEST_STEPS:
                continue
            report(f"noise of {steps:,} steps of {batch:,} samples")
            sigma = target.noise_multiplier(batch, steps, ratio)
            ratio = sigma / target.central_limit(batch, steps)
            points.append(Point(parameters=parameters, batch_size=batch, steps=steps, noise_multiplier=sigma))
    return points
