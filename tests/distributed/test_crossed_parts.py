"""Tensor parallelism beside context parallelism, under FSDP2 and HSDP, too, gives the update of one process.

A sample's gradient is a sum over the context ranks of vectors in parts over the tensor ranks. Failure modes: 2 (one
threshold for a sample, whatever ranks hold of it); 14 and 15 (noise of the whole, by element); 17 (ranks of one model
are one rank to the sampler). The last two tests plant faults of the library, and of scripts.
"""

import pytest

from tests.distributed.launch import shared
from tests.distributed.test_tensor_parallel import exact

EXACT = ("alone:all-layer:auto+verified", "flat:block-wise:auto+plain")
ON_FOUR = (
    *("alone:layer-wise:auto+whole", "alone:block-wise:ghost+plain", "alone:all-layer:auto+ring"),
    *("fsdp2:all-layer:auto+verified", "fsdp2:layer-wise:auto+checkpoint", "fsdp2:all-layer:ghost"),
    *("flat:all-layer:auto+ring+verified", "flat:layer-wise:ghost", "flat:all-layer:auto+saved"),
)
ON_EIGHT = ("fsdp2:all-layer:auto", "flat:block-wise:ghost", "hsdp:layer-wise:auto")
"""Two data ranks, or two replicas, times two times two."""
ITEMS = [
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in (*EXACT, *ON_FOUR)),
    *(pytest.param(8, case, marks=pytest.mark.exhaustive) for case in ON_EIGHT),
]
found = shared("crossed_parts_worker.py", ITEMS, lambda world_size, case: (world_size, case), size=6)


@pytest.mark.parametrize(("world_size", "case"), ITEMS)
@pytest.mark.exhaustive
def test_parts_of_the_model_and_of_the_samples_change_no_update(world_size: int, case: str) -> None:
    for result in found(world_size, case):
        assert exact(result)


FAULTS = {"own-slice-only": 0.85, "own-part-only": 0.85, "whole-counted-by-each": 1.05, "terms-squared": 0.98}
"""The mean norm, relative to the truth, at most if it is below 1, else at least."""
PLANTED = [pytest.param(f"alone:all-layer:auto+{fault}", marks=pytest.mark.exhaustive) for fault in FAULTS]
found_planted = shared("crossed_parts_worker.py", PLANTED, lambda case: (4, case))


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_shows(case: str) -> None:
    """Slices and parts of other ranks are left out; copies count twice; terms are squared before they are added."""
    bound = FAULTS[case.partition("+")[2]]
    for result in found_planted(case):
        assert result["error"] > 1e-4
        parted, alone = (metrics["grad_norm/all-layer"] for metrics in result["metrics"])
        assert parted / alone < bound if bound < 1 else parted / alone > bound


UNEQUAL = "LogicalBatchError: The clipped sums of parameters that every rank"
REFUSED = {
    "alone:all-layer:auto+cut": "ConfigurationError: model_parallel_parts gives 0 for a model that parallelize_module",
    "flat:all-layer:auto+strangers": "LogicalBatchError: The ranks that hold one model were given different inputs",
    "alone:all-layer:auto+digested+own-part-only+plain": UNEQUAL,
    "flat:all-layer:auto+digested+own-part-only+plain": UNEQUAL,
    "fsdp2:all-layer:auto+verified+own-slice-only": "VerificationError: ",
    "fsdp2:all-layer:auto+verified+terms-squared": "VerificationError: ",
}
TOLD = [pytest.param(case, text, marks=pytest.mark.exhaustive) for case, text in REFUSED.items()]
found_refused = shared("crossed_parts_worker.py", TOLD, lambda case, _: (4, case), size=6)


@pytest.mark.parametrize(("case", "text"), TOLD)
def test_what_is_not_exact_is_refused(case: str, text: str) -> None:
    for result in found_refused(case, text):
        assert result["refused"].startswith(text)
