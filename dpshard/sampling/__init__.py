"""The samples of a batch: the draw of a step, its micro-batches, and their data.

May import `randomness` and below. Begin with `plans.py`.
"""

from dpshard.sampling.loading import load, load_stream, require_dataset
from dpshard.sampling.orders import CyclicPoissonSampler, FixedOrderSampler
from dpshard.sampling.packed_tokens import PackedTokens
from dpshard.sampling.packing import Packing, packed_tokens, packer, require_packing
from dpshard.sampling.participation import Participation
from dpshard.sampling.plans import (
    MicroBatchPlan,
    PoissonSampler,
    Sampler,
    default_cap,
    parse_cap,
    plan_micro_batches,
    plan_steps,
    require_feed,
)
from dpshard.sampling.repeats import warn_of_repeats
from dpshard.sampling.samplers import sampler_of
from dpshard.sampling.streams import Stream, fingerprints
