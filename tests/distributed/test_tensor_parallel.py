"""Tensor parallelism never changes the update: two noisy Poisson steps equal those of one process in float64.

Failure modes: 2 (one threshold for a sample, whatever ranks hold of it); 14 (noise of the whole sum); 15 (parts have
independent noise, copies equal noise: else parameters would differ); 17 (ranks of one model are one rank to the
sampler). The last two tests plant faults of the library, and of scripts.
"""

from typing import Any

import pytest

from tests.distributed.launch import shared

EXACT = (
    *("all-layer:auto+verified", "layer-wise:auto+loss", "block-wise:auto+checkpoint", "all-layer:ghost"),
    *("all-layer:auto+plain", "all-layer:auto+correlated", "all-layer:auto+plain+buffered"),
)
THOROUGH = (
    *("param-wise:bk", "all-layer:auto+whole+verified", "all-layer:auto+plain+verified", "all-layer:auto+logits"),
    *("layer-wise:auto+tracked", "layer-wise:auto+tied", "all-layer:auto+tied", "layer-wise:auto+loss+verified"),
)
ON_FOUR = ("all-layer:ghost",)
FAULTS = {"own-part-only": 0.2, "whole-counted-by-each": 0.01, "terms-squared": 0.002}
"""By how much the norms are off, at least, relative to the truth."""
REFUSED = {
    "strangers": "LogicalBatchError: The ranks that hold one model were given different inputs",
    "digested+own-part-only+plain": "LogicalBatchError: The clipped sums of parameters that every rank",
    "compiled": "UnsupportedParameterError: blocks.0",
    "verified+terms-squared": "VerificationError: ",
}

UNDER_FSDP = ("fsdp2:layer-wise:auto+checkpoint", "fsdp2:all-layer:ghost")
UNDER_HSDP = ("hsdp:all-layer:auto+verified", "hsdp:block-wise:auto")
ON_OTHER_MESHES = ("fsdp2:layer-wise:auto+started",)
CORRELATED = ("fsdp2:layer-wise:auto+buffered", "hsdp:all-layer:auto+correlated")
CORRELATED_RESUMED = ("fsdp2:all-layer:auto+resumed+buffered", "fsdp2:all-layer:auto+started+correlated")
ITEMS = [
    *(pytest.param(2, f"tp:{case}") for case in EXACT),
    *(pytest.param(2, case) for case in ("fsdp2:layer-wise:auto+checkpoint", "fsdp2:all-layer:auto+retied+verified")),
    pytest.param(2, "tp:all-layer:auto+resumed"),
    *(pytest.param(2, f"tp:{case}", marks=pytest.mark.exhaustive) for case in THOROUGH),
    *(pytest.param(4, f"tp:{case}", marks=pytest.mark.exhaustive) for case in ON_FOUR),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in (*UNDER_FSDP, "fsdp2:all-layer:auto+plain")),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in (*UNDER_HSDP, *ON_OTHER_MESHES)),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in (*CORRELATED, *CORRELATED_RESUMED)),
]
found = shared("tensor_parallel_worker.py", ITEMS, lambda world_size, case: (world_size, case), size=8)


@pytest.mark.parametrize(("world_size", "case"), ITEMS)
def test_the_update_does_not_depend_on_parts(world_size: int, case: str) -> None:
    for result in found(world_size, case):
        assert exact(result)


def exact(result: dict[str, Any]) -> bool:
    parted, alone = result["metrics"]
    assert result["epsilon"][0] == result["epsilon"][1]
    assert parted == pytest.approx(alone, rel=1e-12)
    assert parted["clip_fraction"] > 0
    return result["error"] <= 1e-12


PLANTED = [pytest.param(f"tp:all-layer:auto+{fault}") for fault in FAULTS]
found_planted = shared("tensor_parallel_worker.py", PLANTED, lambda case: (2, case))


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_shows(case: str) -> None:
    """A rank's own part alone is 0.72 of a norm; copies count twice; squares of terms are not those of their sum."""
    for result in found_planted(case):
        assert result["error"] > 1e-4
        parted, alone = result["metrics"]
        ratio = parted["grad_norm/all-layer"] / alone["grad_norm/all-layer"]
        assert abs(ratio - 1) > FAULTS[case.partition("+")[2]]


TOLD = [pytest.param(f"tp:all-layer:auto+{options}", text) for options, text in REFUSED.items()]
found_refused = shared("tensor_parallel_worker.py", TOLD, lambda case, _: (2, case))


@pytest.mark.parametrize(("case", "text"), TOLD)
def test_what_is_not_exact_is_refused(case: str, text: str) -> None:
    for result in found_refused(case, text):
        assert result["refused"].startswith(text)


def test_copies_have_equal_noise_that_depends_on_the_sums() -> None:
    case = "tp:all-layer:auto+digested+plain"
    ranks = shared("tensor_parallel_worker.py", [pytest.param(case)], lambda case: (2, case))(case)
    assert ranks[0]["copies"] == ranks[1]["copies"]
    assert ranks[0]["error"] > 1e-6  # another noise than that of sums taken for equal
