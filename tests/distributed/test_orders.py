"""Balls in bins, streams and own loops on two ranks release what one process releases; other slices are refused."""

import re
from typing import Any

import pytest
import torch

from tests.distributed.launch import together
from tests.distributed.orders_worker import STEPS, outcome

RELEASED = (
    "ddp:bins:",
    "fsdp2:bins:",
    "ddp:bins:split",
    "ddp:bins:unknown",
    "fsdp2:bins:split-unknown",
    "ddp:stream:",
    "fsdp2:stream:",
    "ddp:loop:",
)
OTHER_ROWS = "the same samples in different orders.*manual_seed"
REFUSED = {
    "ddp:bins:own-split": OTHER_ROWS,
    "fsdp2:bins:own-split": OTHER_ROWS,
    "ddp:bins:own-split-unknown": OTHER_ROWS,
    "ddp:bins:own-files": OTHER_ROWS,
    "ddp:bins:own-units": OTHER_ROWS,
    "ddp:bins:subset-of-own-units": OTHER_ROWS,
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
    _, kind, how = case.split(":")
    told, alone = outcome(f":{kind}:{how}")
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
    assert re.search(REFUSED[case], one)
    assert released == also_released
    assert len(released) < STEPS
