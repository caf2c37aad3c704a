"""Clipping thresholds: fixed, or following a quantile of the gradient norms at a cost in privacy.

[Note: Counts within the same noise] Each group sums b - 1/2 over the samples; b is 1 if a sample is not clipped, else
0. One sample changes this count by 1/2. A sample without a gradient in the group has b = 1, because other samples may
decide whether a group runs. One Gaussian mechanism releases all sums and counts. The sums have sensitivity S = sqrt(sum
R_m^2) and noise deviation s, the M counts have sqrt(M) / 2 and t. In units of the noise, one sample changes the whole
by

    (S / s)^2 + (M / 4) / t^2 = (1 - share) / sigma^2 + share / sigma^2 = 1 / sigma^2

if s = sigma S / sqrt(1 - share) and t = sigma sqrt(M / share) / 2. So a step is the same release as with fixed
thresholds. The next one may use the released counts (adaptive composition). Andrew et al. 2021, arXiv:1905.03871, Thm.
1; several groups: He et al. 2022, arXiv:2212.01539.

[Note: Noise of one count] A repeated step may count a sample at its threshold differently. The noise
depends on the exact counts ([Note: Equal sums, equal noise] in noise/digest.py), so all later steps then get
independent noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dpshard.clipping.groups import sensitivity
from dpshard.clipping.metrics import BatchMetrics
from dpshard.clipping.tape import Clipper
from dpshard.config import NoiseName, is_number, require_positive
from dpshard.errors import CheckpointError, ConfigurationError, LogicalBatchError
from dpshard.noise.keyed import KeyedGaussian
from dpshard.randomness import derive_key

COUNT_GRID = 2.0**-10
"""Grid of the published counts: the last bits of float64 noise may reveal exact counts ([Note: Secure noise])."""

FARTHEST = 1e12
"""Largest ratio of a threshold to its first value, either way."""


@dataclass(frozen=True, slots=True)
class QuantileTracking:
    """Each group's threshold follows a quantile of its gradient norms; see [Note: Counts within the same noise].

    After a step R <- R exp(-learning_rate (f - quantile)). f in [0, 1] is the noisy share of samples with norms up to
    R.
    """

    quantile: float = 0.5
    """Share of the samples that must not be clipped, in (0, 1)."""
    learning_rate: float = 0.2
    """> 0. One step changes a threshold by exp(learning_rate) at most."""
    budget_share: float = 0.01
    """Share of the privacy budget (of 1 / sigma^2) for the counts, in (0, 1).

    0.01 adds 0.5% to the gradient's noise. f has a standard deviation of 5 sigma sqrt(groups) / (batch size).
    """

    def __post_init__(self) -> None:
        for name in ("quantile", "budget_share"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < 1):
                raise ConfigurationError(f"{name}={value!r}: it must be above 0 and below 1.")
        require_positive("learning_rate", self.learning_rate)


class HasMetrics(Protocol):
    """The logical batch in progress."""

    def complete_metrics(self) -> BatchMetrics:
        """Return its metrics over all ranks."""
        ...


class Thresholds:
    """Fixed thresholds of a clipper's groups."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper

    @property
    def values(self) -> tuple[float, ...]:
        """R_m of the next step."""
        return tuple(group.threshold for group in self._clipper.groups)

    def gradient_noise(self, sigma: float) -> float:
        """Return the deviation of the clipped sums' noise at noise multiplier `sigma`."""
        return sigma * sensitivity(self._clipper.groups)

    def counts(self, collector: HasMetrics) -> list[str]:
        """Exact counts, to which `move` adds noise."""
        return []

    def refuse_own_loop(self) -> None:
        """Raise LogicalBatchError if these thresholds need `engine.batches`."""

    def move(self, metrics: BatchMetrics, noise: KeyedGaussian, *, step: int, sigma: float, batch_size: int) -> None:
        """Adapt to a released step, by the `metrics` of all ranks."""

    def state_dict(self) -> dict[str, Any] | None:
        """State for a checkpoint, if any."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load a `state_dict`, or raise CheckpointError."""


def require_tracking(tracking: QuantileTracking | None, max_grad_norm: float, noise: NoiseName) -> None:
    """Raise ConfigurationError unless thresholds can start at `max_grad_norm` and follow `tracking`."""
    require_positive("max_grad_norm", max_grad_norm)
    if not isinstance(tracking, QuantileTracking | None):
        raise ConfigurationError(f"adaptive_clipping={tracking!r}: pass a dpshard.QuantileTracking(...), or None.")
    if tracking is not None and noise != "gaussian":
        raise ConfigurationError(
            f"noise={noise!r} is not analysed together with the counts of adaptive_clipping, which get Gaussian "
            f"noise: fix the thresholds, or take noise='gaussian'."
        )


class TrackedThresholds(Thresholds):
    """Thresholds that follow a quantile."""

    def __init__(self, clipper: Clipper, tracking: QuantileTracking) -> None:
        super().__init__(clipper)
        self._tracking = tracking
        self._first = self.values

    def gradient_noise(self, sigma: float) -> float:
        """Return the deviation of the clipped sums' noise, larger because the counts take a share."""
        return super().gradient_noise(sigma / math.sqrt(1 - self._tracking.budget_share))

    def count_noise(self, sigma: float) -> float:
        """Return the deviation of a count's noise."""
        return sigma * math.sqrt(len(self._first) / self._tracking.budget_share) / 2

    def counts(self, collector: HasMetrics) -> list[str]:
        """Exact counts, to which `move` adds noise."""
        return [str(self._counts(collector.complete_metrics()).tolist())]

    def _counts(self, metrics: BatchMetrics) -> Tensor:
        return metrics.unclipped_excess([group.label for group in self._clipper.groups])

    def refuse_own_loop(self) -> None:
        """Raise LogicalBatchError: these thresholds need `engine.batches`."""
        # A repeated backward would silently count a sample twice.
        raise LogicalBatchError(
            "adaptive_clipping counts samples, so each must come once. Iterate over engine.batches(dataset, "
            "micro_batch_size), which ensures that, not over your own batches."
        )

    def move(self, metrics: BatchMetrics, noise: KeyedGaussian, *, step: int, sigma: float, batch_size: int) -> None:
        """Move the thresholds by the noisy counts of a released step."""
        tracking, counts_M = self._tracking, self._counts(metrics)
        # A secret of its own. On the CPU, because all ranks must draw the same noise.
        noise = KeyedGaussian(derive_key(noise.secret, "clipping counts"), secure=noise.secure)
        noise.add_(counts_M, step=step, name="clipping counts", std=self.count_noise(sigma))
        moved = []
        published_M = (counts_M / COUNT_GRID).round() * COUNT_GRID
        for first, old, count in zip(self._first, self.values, published_M.tolist(), strict=True):
            unclipped = min(max(0.5 + count / batch_size, 0.0), 1.0)
            new = old * math.exp(-tracking.learning_rate * (unclipped - tracking.quantile))
            moved.append(min(max(new, first / FARTHEST), first * FARTHEST))
        self._clipper.set_thresholds(moved)

    def state_dict(self) -> dict[str, Any]:
        """Thresholds of the next step."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: Any) -> None:
        """Load the thresholds of the next step, or raise CheckpointError."""
        values: Any = state.get("values") if isinstance(state, dict) else None
        sound = isinstance(values, Sequence) and len(values) == len(self._first)
        if not sound or not all(is_number(value) and 0 < value < math.inf for value in values):
            raise CheckpointError(
                f"The checkpoint has no clipping thresholds of the {len(self._first)} groups ({state!r}), so steps "
                f"would be released again with other ones. Resume from another checkpoint."
            )
        self._clipper.set_thresholds(values)
