"""The sampler of a run."""

from __future__ import annotations

from dpshard.config import BatchSchedule, SamplingName, steps_of_epoch
from dpshard.sampling.allocation import AllocationSampler
from dpshard.sampling.orders import CyclicPoissonSampler, FixedOrderSampler
from dpshard.sampling.plans import PoissonSampler, Sampler


def sampler_of(
    sampling: SamplingName,
    samples: int,
    schedule: BatchSchedule,
    secret: bytes,
    *,
    max_batch_size: int | None = None,
    bands: int | None = None,
) -> Sampler:
    """Return the sampler of a run. `bands`: bands of its correlated noise, or None for independent noise."""
    if sampling == "balls-in-bins":
        return AllocationSampler(samples, steps_of_epoch(samples, schedule[0]), secret, bands is not None)
    if sampling == "fixed-order":
        return FixedOrderSampler(samples, schedule[0], secret)
    if sampling == "cyclic-poisson":
        assert bands is not None  # require_sampling
        return CyclicPoissonSampler(samples, schedule[0], bands, secret)
    return PoissonSampler(samples, schedule, secret, max_batch_size=max_batch_size)
