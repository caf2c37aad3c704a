"""DeepSpeed's ZeRO-1, 2 and 3: the optimizer steps on flat fp32 partitions, one per rank.

[Note: What reaches DeepSpeed] Anchors differentiate dummies, so any gradient of a parameter is a leak, and raises.
Clipped sums are summed over ranks into accumulators laid out like the partitions. At the inner optimizer's step the
noised and divided accumulator becomes the partition's gradient. Without privatization it has none.
"""

from __future__ import annotations

from typing import Any

from dpshard.backends.backend import Backend
from dpshard.backends.deepspeed.config import refuse_unsupported
from dpshard.backends.deepspeed.gradients import PartitionReduction, PartitionStore, reducer_of
from dpshard.backends.deepspeed.sharding import ZeroSharding


def deepspeed_backend(model_engine: Any) -> Backend:
    """Back-end of a model engine."""
    stage = refuse_unsupported(model_engine)
    sharding = ZeroSharding(model_engine, stage)
    communicator, reducer = sharding.communicator, reducer_of(sharding, stage)
    reduction = PartitionReduction(model_engine, reducer, stage=stage)
    layout = f"ZeRO-{stage} on {communicator.world_size} ranks"
    return Backend(layout, communicator, sharding, reduction, PartitionStore(sharding, reducer))
