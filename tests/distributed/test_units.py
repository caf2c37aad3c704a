"""Units of several rows on two ranks: the update is that of the float64 oracle."""

import pytest

from tests.distributed.launch import together
from tests.extras import needs_deepspeed
from tests.oracle import TOLERANCE

TORCH = ("ddp", "fsdp2", "hsdp", "regrouped")
DEEPSPEED = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("case", TORCH[:3])
def test_units_are_exact_on_two_ranks(case):
    errors = together("units_worker.py", 2, *TORCH)[case]
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE


def test_equal_rows_of_two_units_beside_one_on_another_rank_hide_no_order():
    """Ranks compare as many units as all of them have: one, which tells no order."""
    assert together("units_worker.py", 2, *TORCH)["regrouped"] == ["BatchLayoutError"] * 2


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED)
def test_units_are_exact_under_deepspeed(case):
    """To the rounding of float32, in which DeepSpeed trains."""
    errors = together("units_worker.py", 2, *DEEPSPEED)[case]
    assert len(errors) == 2
    assert max(errors) <= 1e-6
