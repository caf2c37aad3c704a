"""Who is in the batch: the draw of a step, its micro-batches, and their data.

`plans.py`: Poisson sampling, and micro-batches on every rank. `orders.py`: other sampling. `loading.py`: reading,
collating and padding. `units.py`: units of several rows; `UnitDataset` and `augment` are for users. `packing.py`:
several units in one row; `packed_tokens.py`: the unit of every token. May import `randomness` and below. Begin with
`plans.py`.
"""

from dpshard.sampling.loading import check_dataset, load
from dpshard.sampling.orders import CyclicPoissonSampler, FixedOrderSampler, sampler_of
from dpshard.sampling.packed_tokens import NO_UNIT, PackedTokens
from dpshard.sampling.packing import Packing, check_packing, packed_tokens, packer
from dpshard.sampling.plans import (
    MicroBatchPlan,
    PoissonSampler,
    check_feed,
    default_cap,
    parse_cap,
    plan_micro_batches,
    plan_steps,
)

__all__ = [
    "NO_UNIT",
    "CyclicPoissonSampler",
    "FixedOrderSampler",
    "MicroBatchPlan",
    "PackedTokens",
    "Packing",
    "PoissonSampler",
    "check_dataset",
    "check_feed",
    "check_packing",
    "default_cap",
    "load",
    "packed_tokens",
    "packer",
    "parse_cap",
    "plan_micro_batches",
    "plan_steps",
    "sampler_of",
]
