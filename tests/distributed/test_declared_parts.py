"""Parts that the user tells: tensor parallelism by hand, and context parallelism, give the update of one process.

Under context parallelism a sample's gradient is a sum over parts of its sequence, one sample a group. Failure modes:
2 (one threshold for a sample, whatever ranks hold of it); 14 and 15 (noise of the whole); 17 (ranks of one model are
one rank to the sampler).
"""

import pytest

from tests.distributed.launch import shared

EXACT = (
    *("tp:alone:all-layer:auto+verified", "tp:ddp:layer-wise:auto", "tp:fsdp2:all-layer:ghost"),
    *("cp:alone:all-layer:ghost", "cp:ddp:block-wise:auto", "cp:fsdp2:all-layer:auto+verified"),
    *("cp:fsdp2:layer-wise:ghost", "cp:flat:block-wise:auto", "ring:flat:all-layer:auto+verified"),
    "cp:flat:all-layer:auto+saved",
)
ON_FOUR = (
    *("tp:alone:all-layer:auto", "tp:ddp:all-layer:auto+verified", "ring:alone:layer-wise:auto+verified"),
    *("cp:flat:layer-wise:auto+saved", "ring:flat:all-layer:ghost", "ring:fsdp2:block-wise:auto"),
    *("ring:hsdp:block-wise:auto", "ring:hflat:all-layer:auto+verified"),
)
ON_EIGHT = (
    "tp:hsdp:all-layer:ghost",
    "cp:hsdp:layer-wise:auto+verified",
    "cp:hflat:layer-wise:auto",
    "cp:hflat:all-layer:ghost",
)
"""Two replicas of two shards of two parts."""
REFUSED = {
    "tp:alone:all-layer:auto+undeclared": "ConfigurationError: 1 of 2 ranks share the data",
    "cp:ddp:all-layer:auto+undeclared": "ConfigurationError: 1 of 2 ranks share the data",
    "tp:flat:all-layer:auto": "ConfigurationError: fully_shard has a mesh with ranks that hold one model.",
    "cp:replicas:all-layer:auto": "ConfigurationError: fully_shard has a mesh with ranks that hold one model.",
    "tp:fsdp2:all-layer:auto+saved": "ConfigurationError: A Checkpointer cannot tell which parts of a model",
    "cp:flat:all-layer:auto+verified+uncounted": "VerificationError: ",
    "cp:alone:all-layer:auto+own": "LogicalBatchError: Ranks hold parts of one sample",
    "cp:alone:all-layer:auto+lied": "LogicalBatchError: The ranks that hold one model were given different inputs",
    "tp:alone:all-layer:auto+forgotten+digested": "LogicalBatchError: The clipped sums of parameters that every rank",
}

ITEMS = [
    *(pytest.param(2, case) for case in EXACT),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in ON_FOUR),
    *(pytest.param(8, case, marks=pytest.mark.exhaustive) for case in ON_EIGHT),
]
found = shared("declared_parts_worker.py", ITEMS, lambda world_size, case: (world_size, case), size=6)


@pytest.mark.parametrize(("world_size", "case"), ITEMS)
def test_declared_parts_change_no_update(world_size: int, case: str) -> None:
    for result in found(world_size, case):
        assert result["error"] <= 1e-12
        parted, alone = result["metrics"]
        assert parted == pytest.approx(alone, rel=1e-12)
        assert result["epsilon"][0] == result["epsilon"][1]


CASES_REFUSED = [pytest.param(case, text) for case, text in REFUSED.items()]
FOREIGN = "ring:fsdp2:all-layer:auto+foreign", "ConfigurationError: The forward of the model computes on DTensors"
CASES_REFUSED.append(pytest.param(*FOREIGN, marks=pytest.mark.exhaustive))
found_refused = shared("declared_parts_worker.py", CASES_REFUSED, lambda case, _: (4 if "foreign" in case else 2, case))


@pytest.mark.parametrize(("case", "text"), CASES_REFUSED)
def test_what_nobody_tells_is_refused(case: str, text: str) -> None:
    for result in found_refused(case, text):
        assert result["refused"].startswith(text)
