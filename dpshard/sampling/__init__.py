"""Who is in the batch: the draw of a step, its micro-batches, and their data.

`plans.py`: Poisson sampling, and micro-batches on every rank. `loading.py`: reading, collating and padding. `units.py`:
units of several rows; `UnitDataset` and `augment` are for users. May import `randomness` and below. Begin with
`plans.py`.
"""

from dpshard.sampling.loading import check_dataset, load
from dpshard.sampling.plans import (
    MicroBatchPlan,
    PoissonSampler,
    check_feed,
    default_cap,
    parse_cap,
    plan_micro_batches,
    poisson_plans,
)

__all__ = [
    "MicroBatchPlan",
    "PoissonSampler",
    "check_dataset",
    "check_feed",
    "default_cap",
    "load",
    "parse_cap",
    "plan_micro_batches",
    "poisson_plans",
]
