"""Ranks that reach clipping groups in other orders meet in one order of collectives, and sum what waited (row 14)."""

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.distributed.launch import together
from tests.oracle import TOLERANCE

BACKENDS = ["ddp", "fsdp2"] + ["fsdp2-unused"] * hasattr(FSDPModule, "set_reduce_scatter_unused_params")
CASES = [f"{backend}:{nbytes}" for backend in BACKENDS for nbytes in (700, 2**25)]
"""Two groups share an anchor and close early, or all groups share one; ranks may use different parameters."""


@pytest.mark.parametrize("case", CASES)
def test_ranks_may_reach_groups_in_other_orders(case: str) -> None:
    for error in together("waiting_worker.py", 2, *CASES, "again")[case]:
        assert isinstance(error, float), error
        assert error <= TOLERANCE


def test_sums_that_one_reduction_would_miss_are_refused() -> None:
    for message in together("waiting_worker.py", 2, *CASES, "again")["again"]:
        assert "was summed twice in one backward pass" in str(message)
