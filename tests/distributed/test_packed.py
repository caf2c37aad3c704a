"""Packed documents on two ranks: the update is that of the float64 oracle, one document at a time."""

import pytest

from tests.distributed.launch import together
from tests.oracle import TOLERANCE

EXACT = ("ddp", "fsdp2", "ddp-uneven", "fsdp2-uneven", "ddp-own", "fsdp2-own")
REFUSED = ("ddp-across", "fsdp2-across")


@pytest.mark.parametrize("case", EXACT)
def test_packed_rows_are_exact_on_two_ranks(case):
    errors = together("packed_worker.py", 2, *EXACT)[case]
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("case", REFUSED)
def test_attention_that_looks_across_is_caught_on_all_ranks(case):
    assert together("packed_worker.py", 2, *REFUSED)[case] == ["VerificationError"] * 2
