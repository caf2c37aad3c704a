"""DeepSpeed's ZeRO-1, 2 and 3: the optimizer steps on flat fp32 partitions, one a rank.

[Note: What reaches DeepSpeed]
Anchors hang on dummies, not on parameters, so in a private backward pass no gradient reaches a parameter at all, and
whatever does is a leak and raises. Clipped sums are summed over ranks here ([Note: Why DeepSpeed does not reduce]),
into accumulators laid out as DeepSpeed's fp32 partitions. When DeepSpeed has come to its own optimizer's step (the
hook of step/optimizer_hook.py), the accumulator, noised and divided, takes the place of the partition's gradient.
So averaging, accumulation steps, buckets, communication dtype and stale gradients of DeepSpeed have no say, and
a step that was not privatized has no gradient to step with.
"""

from __future__ import annotations

from typing import Any

from dpshard.backends.backend import Backend
from dpshard.backends.deepspeed.config import refuse_unsupported
from dpshard.backends.deepspeed.gradients import PartitionReduction, PartitionStore, reducer_of
from dpshard.backends.deepspeed.sharding import ZeroSharding


def deepspeed_backend(model_engine: Any) -> Backend:
    """Return the back-end of what deepspeed.initialize() returns.

    Raises ConfigurationError for what DeepSpeed is configured to do that would not be private, or not be exact.
    """
    stage = refuse_unsupported(model_engine)
    sharding = ZeroSharding(model_engine, stage)
    communicator, reducer = sharding.communicator, reducer_of(sharding, stage)
    reduction = PartitionReduction(model_engine, reducer, stage=stage)
    layout = f"ZeRO-{stage} on {communicator.world_size} ranks"
    return Backend(layout, communicator, sharding, reduction, PartitionStore(sharding, reducer))
