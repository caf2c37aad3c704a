"""Units of several rows on two ranks: the update is that of the float64 oracle."""

import pytest

from tests.distributed.launch import together
from tests.extras import needs_deepspeed
from tests.oracle import TOLERANCE

TORCH = ("ddp", "fsdp2", "hsdp")
DEEPSPEED = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("case", TORCH)
def test_units_are_exact_on_two_ranks(case):
    errors = together("units_worker.py", 2, *TORCH)[case]
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED)
def test_units_are_exact_under_deepspeed(case):
    """To the rounding of float32, in which DeepSpeed trains."""
    errors = together("units_worker.py", 2, *DEEPSPEED)[case]
    assert len(errors) == 2
    assert max(errors) <= 1e-6
