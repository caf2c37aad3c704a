"""Noise over the expected batch, against compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from dpshard.accounting import SampledMechanism, calibrate, calibrate_release, epsilon_of
from dpshard.config import BatchSchedule

SMALLEST_BATCH = 16
FARTHEST = 2.5
TOLERANCE = 5e-3
"""Relative tolerance of epsilon; sigma is never too small."""
DRAFT = "pld-draft"
"""Accountant whose epsilon is an upper bound, computed more quickly than by "pld"."""
_TRIES = 12


@dataclass(frozen=True, slots=True)
class TradeOff:
    """A run with another batch."""

    batch_size: int
    noise_multiplier: float
    epochs: float
    relative_noise: float
    """Sigma over batch, over that of a batch of all samples."""

    @property
    def noise_per_batch(self) -> float:
        """Sigma over the expected batch."""
        return self.noise_multiplier / self.batch_size


@dataclass(frozen=True, slots=True)
class Target:
    """The number of samples, and the budget (epsilon, delta)."""

    sample_size: int
    target_epsilon: float
    target_delta: float

    def noise_multiplier(self, batch_size: int, steps: int, ratio: float = 1.0) -> float:
        """Return a sigma with an epsilon at most TOLERANCE below the budget, never above.

        A guess of sigma over `central_limit` saves time.
        """
        sigma = ratio * self.central_limit(batch_size, steps)
        slope, before, stride = self._slope(sigma), math.nan, 0.0
        for _ in range(_TRIES):
            overspend = self.log_overspend(batch_size, steps, sigma)
            if -TOLERANCE <= overspend <= 0:
                return sigma
            if stride:
                slope = min(max((overspend - before) / stride, -20.0), -0.3)
            before, stride = overspend, min(max(-(overspend + TOLERANCE / 2) / slope, -2.0), 2.0)
            sigma *= math.exp(stride)
        run = self._run(batch_size, steps, math.nan)
        return calibrate(run, target_epsilon=self.target_epsilon, target_delta=self.target_delta).noise_multiplier

    def central_limit(self, batch_size: int, steps: int) -> float:
        """Return sigma by mu^2 = steps q^2 (e^(1 / sigma^2) - 1): quick, but no bound."""
        q = batch_size / self.sample_size
        return math.log1p(largest_mu(self) ** 2 / (steps * q**2)) ** -0.5

    def _slope(self, sigma: float) -> float:
        """Return d log epsilon / d log sigma, by the central limit."""
        x = sigma**-2
        by_mu = self.log_overspend(self.sample_size, 1, 1 / (1.01 * largest_mu(self))) / math.log(1.01)
        return -by_mu * x / -math.expm1(-x)

    def log_overspend(self, batch_size: int, steps: int, sigma: float) -> float:
        """Return log epsilon over the target."""
        epsilon = epsilon_of(self._run(batch_size, steps, sigma).releases(), self.target_delta, DRAFT)
        return math.log(min(max(epsilon / self.target_epsilon, 1e-3), 1e3))

    def _run(self, batch_size: int, steps: int, sigma: float) -> SampledMechanism:
        schedule = BatchSchedule((batch_size,) * steps)
        return SampledMechanism(schedule=schedule, sample_size=self.sample_size, noise_multiplier=sigma)


@cache
def largest_mu(target: Target) -> float:
    """Return 1 / sigma of the least noisy release of all samples within the budget."""
    budget = {"target_epsilon": target.target_epsilon, "target_delta": target.target_delta}
    return 1 / calibrate_release(target.sample_size, **budget).noise_multiplier


def trade_offs(target: Target, steps: int, *, also: int | None = None) -> tuple[TradeOff, ...]:
    """Return runs of `steps` steps, from half of the samples down, and `also` a batch."""
    samples = target.sample_size
    # Without sampling, Gaussian steps compose to one step of sigma / sqrt(steps).
    least, found = target.noise_multiplier(samples, 1) * math.sqrt(steps) / samples, []
    before = ratio = 1.0
    sizes: set[int] = {*_sizes(samples)} if also is None else {*_sizes(samples), also}
    for batch_size in sorted(sizes, reverse=True):
        sigma = target.noise_multiplier(batch_size, steps, ratio * (ratio / before) ** 2)
        # The error of the central limit grows by more with each halving.
        before, ratio = ratio, sigma / target.central_limit(batch_size, steps)
        relative_noise, epochs = sigma / batch_size / least, batch_size * steps / samples
        found.append(TradeOff(batch_size, sigma, epochs, relative_noise))
        if relative_noise > FARTHEST and batch_size <= (also or batch_size):
            break
    return tuple(found)


def smallest_within(rows: tuple[TradeOff, ...], relative_noise: float) -> TradeOff:
    """Return the run with the smallest batch within `relative_noise`, or the largest."""
    within = [row for row in rows if row.relative_noise <= relative_noise]
    return min(within, key=lambda row: row.batch_size) if within else rows[0]


def _sizes(samples: int) -> list[int]:
    half = max(1, samples // 2)
    return [half, *(size for k in range(half.bit_length()) if SMALLEST_BATCH <= (size := 1 << k) < half)]
