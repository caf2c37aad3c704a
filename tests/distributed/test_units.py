"""Units of several rows on two ranks: the update is that of the float64 oracle."""

import pytest

from tests.distributed.launch import together
from tests.oracle import TOLERANCE

CASES = ("ddp", "fsdp2")


@pytest.mark.parametrize("case", CASES)
def test_units_are_exact_on_two_ranks(case):
    errors = together("units_worker.py", 2, *CASES)[case]
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE
