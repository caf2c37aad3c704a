"""Checkpointer with real processes: killed at any moment, and continued on other numbers of ranks.

Failure modes: 24 test_a_run_that_is_killed_anywhere_goes_on_as_if_nothing_had_been,
test_a_run_goes_on_with_another_number_of_ranks, and the same by DeepSpeed.
"""

import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.restarts import STEPS
from tests.extras import needs_deepspeed


def restarts(*arguments: str) -> dict:
    return launch("restarts.py", 1, *arguments, timeout=240)


@pytest.mark.exhaustive
def test_a_run_that_is_killed_anywhere_goes_on_as_if_nothing_had_been() -> None:
    found = restarts("kills", "0")
    assert found["deaths"] >= 10, "too few of the kills have met a run that was still going"
    assert_undisturbed(found)


@pytest.mark.exhaustive
@needs_deepspeed
def test_a_run_by_deepspeed_that_is_killed_goes_on_as_if_nothing_had_been() -> None:
    found = restarts("zero_kills")
    assert found["deaths"] == 3
    assert_undisturbed(found)


@pytest.mark.exhaustive
def test_a_run_with_buffers_of_noise_that_is_killed_goes_on_as_if_nothing_had_been() -> None:
    """A checkpoint has no buffers: they are drawn again, bit for bit."""
    found = restarts("buffered_kills")
    assert found["deaths"] == 3
    assert_undisturbed(found)


@pytest.mark.exhaustive
def test_a_run_in_parts_that_is_killed_goes_on_as_if_nothing_had_been() -> None:
    found = restarts("parted_kills")
    assert found["deaths"] == 3
    assert_undisturbed(found)


@pytest.mark.exhaustive
def test_a_run_in_parts_that_is_killed_goes_on_without_parts_and_counts_what_was_seen() -> None:
    """The repeated step has other sums, and so other noise; the ledger has no more releases than there were."""
    found = restarts("meshes")
    assert {name: result["step"] for name, result in found.items()} == dict.fromkeys(found, STEPS)
    releases = {name: result["releases"] for name, result in found.items()}
    repeated = STEPS + 1
    expected = {"undisturbed": STEPS, "in a backward": STEPS, "in a save": repeated, "after a release": repeated}
    assert releases == expected
    epsilon = {result["releases"]: result["epsilon"] for result in found.values()}
    assert epsilon[repeated] > epsilon[STEPS]
    assert found["in a save"]["seen"] == repeated  # on both meshes, with other bits
    assert all(result["seen"] <= result["releases"] for name, result in found.items() if name != "undisturbed")


def assert_undisturbed(found: dict) -> None:
    assert found["replayed"] > 0
    assert found["differing"] == []  # every step, however often it was taken, ended in the same parameters
    for finished in found["finished"]:
        assert finished["step"] == STEPS
        assert finished["parameters"] == found["undisturbed"]["parameters"]
        assert finished["epsilon"] == found["undisturbed"]["epsilon"]
    assert found["finished"][-1]["began"] > 0 or len(found["finished"]) > 1
    assert found["left"] == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    found = restarts("worlds")
    assert_same(found, tolerance=1e-10, began={"ddp to 1": STEPS - 1})


@pytest.mark.exhaustive
def test_a_step_that_is_taken_again_by_another_number_of_ranks_counts_twice() -> None:
    found = restarts("recount")
    assert all((result["began"], result["step"]) == (4, 5) for result in found.values())
    assert found["2 again"]["releases"] == 5  # the same sums, bit for bit
    assert found["by 1"]["releases"] == 6
    assert found["by 1"]["epsilon"] > found["2 again"]["epsilon"]


@pytest.mark.exhaustive
@needs_deepspeed
def test_a_run_by_deepspeed_goes_on_with_other_ranks_stages_and_back_ends() -> None:
    assert_same(restarts("zero_worlds"), tolerance=1e-6)  # float32: the largest error seen is 4e-8


def assert_same(found: dict, *, tolerance: float, began: dict[str, int] | None = None) -> None:
    expected = torch.tensor(found["undisturbed"]["parameters"], dtype=torch.float64)
    assert len(found["results"]) >= 4
    for name, result in found["results"].items():
        assert result["began"] == (began or {}).get(name, 3), name
        assert result["epsilon"] == found["undisturbed"]["epsilon"]
        error = (torch.tensor(result["parameters"], dtype=torch.float64) - expected).norm() / expected.norm()
        assert error <= tolerance, (name, float(error))
