"""A vocabulary head in chunks, on two ranks: the update is that of the float64 oracle."""

import pytest

from tests.distributed.launch import together
from tests.extras import needs_deepspeed
from tests.oracle import TOLERANCE

DEEPSPEED = ("zero2", "zero3", "zero-untied3")
TORCH = ("ddp", "fsdp2", "two-passes", "own-unit")


@pytest.mark.parametrize("case", TORCH[:3])
def test_a_tied_head_in_chunks_is_exact_on_two_ranks(case):
    assert max(together("head_worker.py", 2, *TORCH)[case]) <= TOLERANCE


def test_a_head_that_is_not_gathered_is_refused():
    """A unit of FSDP is whole only in the forward of its own modules."""
    for report in together("head_worker.py", 2, *TORCH)["own-unit"]:
        assert "call chunked_cross_entropy there" in report


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED)
def test_a_head_in_chunks_is_exact_under_deepspeed(case):
    """To the rounding of float32, in which DeepSpeed trains."""
    assert max(together("head_worker.py", 2, *DEEPSPEED)[case]) <= 1e-5
