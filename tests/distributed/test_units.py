"""Units of several rows on two ranks: the update is that of the float64 oracle."""

import pytest

from tests.distributed.launch import shared, together
from tests.extras import needs_deepspeed
from tests.grids import all_pairs
from tests.oracle import TOLERANCE

QUICK = (
    *("ddp+verified", "ddp+16+layer-wise+ghost", "ddp+1+block-wise+adaptive"),
    *("fsdp2+verified", "fsdp2+16+block-wise+per-example", "fsdp2+1+layer-wise+ghost+checkpoint"),
    *("hsdp+16+param-wise+automatic", "hsdp+layer-wise+adaptive"),
    *("zero1+16+layer-wise+checkpoint", "zero2+1+block-wise+automatic", "zero3+verified", "zero3+layer-wise+adaptive"),
)
STYLES = ("all-layer", "block-wise", "layer-wise")
MODES = ("auto", "ghost", "per-example")
HOW = ("checkpoint", "automatic", "adaptive")


def cases(*kinds):
    """The quick cases of these kinds, and exhaustive ones: pairs of kind, K, style, mode and how all meet."""
    of = [case for case in QUICK if case.startswith(kinds)]
    rest = ["+".join(case.values) for case in all_pairs(kinds, ("1", "3", "16"), STYLES, MODES, HOW)]
    # Under ZeRO-3 a model takes no second pass.
    rest = [case.replace("ghost", "bk") if case.startswith("zero3") else case for case in rest]
    return [
        *(pytest.param(case, id=case) for case in of),
        *(pytest.param(case, marks=pytest.mark.exhaustive, id=case) for case in rest if case not in of),
    ]


TORCH, DEEPSPEED = cases("ddp", "fsdp2", "hsdp"), cases("zero1", "zero2", "zero3")
found = shared("units_worker.py", TORCH, lambda case: (2, case), size=9)
found_by_deepspeed = shared("units_worker.py", DEEPSPEED, lambda case: (2, case), size=9)


@pytest.mark.parametrize("case", TORCH)
def test_units_are_exact_on_two_ranks(case):
    errors = found(case)
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE


def test_equal_rows_of_two_units_beside_one_on_another_rank_hide_no_order():
    """Ranks compare as many units as all of them have: one, which tells no order."""
    assert together("units_worker.py", 2, "regrouped")["regrouped"] == ["BatchLayoutError"] * 2


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED)
def test_units_are_exact_under_deepspeed(case):
    """To the rounding of float32, in which DeepSpeed trains."""
    errors = found_by_deepspeed(case)
    assert len(errors) == 2
    assert max(errors) <= 1e-6
