"""A pipeline is killed, and goes on with as many stages or others.

Failure modes: 24 test_a_pipeline_that_is_killed_goes_on_as_if_nothing_had_been and
test_no_stage_hands_out_a_release_before_it_is_on_the_disk.
"""

import pytest

from tests.distributed.launch import launch
from tests.distributed.restarts import STEPS
from tests.distributed.test_checkpointer import assert_same, assert_undisturbed


def restarts(scenario: str) -> dict:
    return launch("staged_restarts.py", 1, scenario, timeout=240)


@pytest.mark.exhaustive
def test_a_pipeline_that_is_killed_goes_on_as_if_nothing_had_been() -> None:
    found = restarts("kills")
    assert found["deaths"] == 5
    assert_undisturbed(found)


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_stages() -> None:
    assert_same(restarts("worlds"), tolerance=1e-10)


@pytest.mark.exhaustive
def test_a_pipeline_that_is_killed_goes_on_in_one_process_and_counts_what_was_seen() -> None:
    """A step that one process repeats has other sums, so other noise, and counts twice."""
    found = restarts("meshes")
    assert {name: result["releases"] for name, result in found.items()} == {
        "in a save": STEPS + 1,
        "after a release": STEPS,
    }
    assert found["in a save"]["seen"] == STEPS + 1
    assert found["in a save"]["epsilon"] > found["after a release"]["epsilon"]


@pytest.mark.exhaustive
def test_no_stage_hands_out_a_release_before_it_is_on_the_disk() -> None:
    found = restarts("handed_out")
    assert found["died"]
    assert found["handed out"] == ["rank 0: 1", "rank 1: 1"]


def test_one_name_of_different_tensors_is_refused_on_all_stages() -> None:
    found = restarts("names")
    assert [found[case]["saved"] for case in ("at once", "later")] == [0, 1]
    for error in found["at once"]["errors"] + found["later"]["errors"]:
        assert "scale is another tensor on rank 1 of the pipeline than on rank 0" in error
