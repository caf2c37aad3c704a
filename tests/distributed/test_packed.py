"""Packed documents on two ranks: the update is that of the float64 oracle, one document at a time."""

import pytest

from tests.distributed.launch import shared
from tests.extras import needs_deepspeed
from tests.grids import all_pairs
from tests.oracle import TOLERANCE

QUICK = (
    *("ddp+uneven", "fsdp2+own", "ddp+block-wise+ghost", "fsdp2+layer-wise+checkpoint", "fsdp2+automatic+workers"),
    *("zero1+layer-wise", "zero2+block-wise+automatic", "zero3+checkpoint"),
    *("ddp+across", "fsdp2+across-there"),
)
MORE = ("fsdp2+uneven", "ddp+own", "hsdp+block-wise+compile", "fsdp2+across")
STYLES = ("all-layer", "block-wise", "layer-wise")
MODES = ("auto", "ghost", "per-example")
HOW = ("compile", "checkpoint", "automatic")


def cases(*kinds):
    """The quick cases of these kinds, and exhaustive ones: pairs of kind, style, mode and how all meet."""
    of = [case for case in QUICK if case.startswith(kinds)]
    rest = [case for case in MORE if case.startswith(kinds)]
    rest += ["+".join(case.values) for case in all_pairs(kinds, STYLES, MODES, HOW)]
    # Under ZeRO-3 a model is not compiled, and takes no second pass.
    for mode, other in (("ghost", "bk"), ("compile", "workers")):
        rest = [case.replace(mode, other) if case.startswith("zero3") else case for case in rest]
    return [
        *(pytest.param(case, id=case) for case in of),
        *(pytest.param(case, marks=pytest.mark.exhaustive, id=case) for case in rest if case not in of),
    ]


TORCH, DEEPSPEED = cases("ddp", "fsdp2", "hsdp"), cases("zero1", "zero2", "zero3")
found = shared("packed_worker.py", TORCH, lambda case: (2, case), size=10)
found_by_deepspeed = shared("packed_worker.py", DEEPSPEED, lambda case: (2, case), size=9)


@pytest.mark.parametrize("case", TORCH)
@pytest.mark.exhaustive
def test_packed_rows_are_exact_on_two_ranks(case):
    """All ranks refuse attention that looks across, if only the rows of one show it where they verify together."""
    ranks = found(case)
    assert len(ranks) == 2
    if "across" in case:
        assert ranks == ["VerificationError"] * 2
    else:
        assert max(ranks) <= TOLERANCE


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED)
def test_packed_rows_are_exact_under_deepspeed(case):
    """To the rounding of float32, in which DeepSpeed trains."""
    ranks = found_by_deepspeed(case)
    assert len(ranks) == 2
    assert max(ranks) <= 1e-6
