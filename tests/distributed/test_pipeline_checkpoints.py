"""A killed pipeline resumes on as many stages or others; so do pipelines side by side.

Failure modes: 24 test_a_pipeline_that_is_killed_goes_on_as_if_nothing_had_been and
test_no_stage_hands_out_a_release_before_it_is_on_the_disk.
"""

import pytest

from tests.distributed.launch import launch
from tests.distributed.restarts import STEPS
from tests.distributed.test_checkpointer import assert_same, assert_undisturbed
from tests.grids import quick


def restarts(*arguments: str) -> dict:
    return launch("staged_restarts.py", 1, *arguments, timeout=240)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("scenario", "deaths"), [("kills", 5), ("kills_of_replicas", 2), ("kills_of_shards", 2)])
def test_a_pipeline_that_is_killed_goes_on_as_if_nothing_had_been(scenario: str, deaths: int) -> None:
    found = restarts(scenario)
    assert found["deaths"] == deaths
    assert_undisturbed(found)
    for finished in found["finished"]:
        assert finished["thresholds"] == found["undisturbed"]["thresholds"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", ["worlds", "worlds_of_replicas", "worlds_of_shards"])
def test_a_run_goes_on_with_another_number_of_stages(scenario: str) -> None:
    found = restarts(scenario)
    assert_same(found, tolerance=1e-10)
    for result in found["results"].values():
        assert result["thresholds"] == found["undisturbed"]["thresholds"]


@pytest.mark.exhaustive
def test_a_pipeline_that_is_killed_goes_on_in_one_process_and_counts_what_was_seen() -> None:
    """A step that one process repeats counts twice, unless its sums have the same bits."""
    found = restarts("meshes")
    undisturbed = found.pop("undisturbed")
    assert len(found) == 3
    for result in found.values():
        assert result["releases"] == result["noted"] >= result["seen"]
    for name in ("in a save", "shards in a save"):
        assert found[name]["seen"] == STEPS + 1
        assert found[name]["epsilon"] > undisturbed["epsilon"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "ranks"), [("alone", 2), ("ddp", 4)])
def test_no_stage_hands_out_a_release_before_it_is_on_the_disk(kind: str, ranks: int) -> None:
    found = restarts("handed_out", kind)
    assert found["died"]
    assert found["handed out"] == [f"rank {rank}: 1" for rank in range(ranks)]


@pytest.mark.parametrize("kind", quick("ddp+adaptive", rest=["fsdp+correlated"]))
def test_pipelines_side_by_side_go_on_from_what_is_sound(kind: str) -> None:
    """A repeated step costs nothing, though the journal knows its release and the checkpoint does not."""
    found = restarts("damaged", kind)
    assert len(found["writers"]) == 4  # of one step: all ranks
    faults = {"lost": f"{found['writers'][-1]} is missing", "swapped": "its size or digest does not match"}
    for fault, text in faults.items():
        for values, warning, *_ in found[fault]:
            assert text in warning
            assert "Resuming from step-00000001" in warning
            assert values == [True, 1, 2, True, 2]  # loaded, step and releases, then the same parameters and releases
    assert all("are unknown" in warning for _, warning in found["forgotten"])
    assert all("There is no other checkpoint" in error for error in found["all lost"])
    assert {len(found[fault]) for fault in ("lost", "swapped", "forgotten", "all lost")} == {4}


@pytest.mark.parametrize("kind", ["alone", "fsdp"])
def test_one_name_of_different_tensors_is_refused_on_all_stages(kind: str) -> None:
    found = restarts("names", kind)
    ranks = 2 if kind == "alone" else 4
    assert found["saved"] == ["step-00000000"]
    assert found["equal"] == [[False]] * ranks
    last, beside = ranks - 1, ranks - 2  # which hold the same shards of the frozen layer
    for case, what in {
        "buffer": f"scale is another tensor on rank {last} than on rank 0",
        "new": f"scale is another tensor on rank {last} than on rank 0",
        "frozen": f"shared.weight is another tensor on rank {last} than on rank {beside}",
    }.items():
        assert len(found[case]) == ranks
        assert all(f"ConfigurationError: {what}" in error for error in found[case])


@pytest.mark.parametrize("kind", ["alone", "ddp"])
def test_ranks_with_different_checkpoints_load_none_and_all_learn_of_a_full_disk(kind: str) -> None:
    """A script that catches the error must not train on with parameters of uncounted releases."""
    found = restarts("apart", kind)
    ranks = 2 if kind == "alone" else 4
    assert len(found["mixed"]) == len(found["full"]) == ranks
    assert all("Ranks have different checkpoints of step 1" in error for error in found["mixed"])
    assert found["step"] == 0
    assert found["unchanged"]
    assert all("the disk is full" in error for error in found["full"])
    assert found["still unchanged"]
