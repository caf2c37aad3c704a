"""Balls in bins, streams and own loops on two ranks release what one process releases; other slices are refused."""

from typing import Any

import pytest
import torch

from tests.distributed.launch import together
from tests.distributed.orders_worker import STEPS, outcome

RELEASED = ("ddp:bins:", "fsdp2:bins:", "ddp:stream:", "fsdp2:stream:", "ddp:loop:")
REFUSED = {
    "ddp:stream:own-part": "ranks read different samples",
    "ddp:loop:unsharded": "are equal to others in it",
    "ddp:loop:shuffled": "was in step",
    "ddp:loop:repeating": "got 2 samples over all ranks",  # DistributedSampler fills the last batch
}


def found(case: str) -> list[Any]:
    return together("orders_worker.py", 2, *RELEASED, *REFUSED)[case]


@pytest.mark.parametrize("case", RELEASED)
def test_two_ranks_release_what_one_process_releases(case: str) -> None:
    """The update does not depend on the number of ranks (row 17)."""
    _, kind, _ = case.split(":")
    told, alone = outcome(f":{kind}:")
    assert told == ""
    for message, released in found(case):
        assert message == ""
        assert len(released) == len(alone) == STEPS
        for row, wanted in zip(released, alone, strict=True):
            torch.testing.assert_close(torch.tensor(row), torch.tensor(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_refuse_together_what_is_not_in_a_fixed_order(case: str) -> None:
    (one, released), (other, also_released) = found(case)
    assert one == other
    assert REFUSED[case] in one
    assert released == also_released
    assert len(released) < STEPS
