"""A rank that raises ends the others within seconds, with its error."""

import time

import pytest

from tests.distributed.launch import FailedRankError, launch


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("leak", "UnsupportedParameterError: weight: a gradient reached it"),
        pytest.param(
            "course",
            "BatchLayoutError: On rank 1 the model runs a forward of a new kind",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_failing_rank_ends_the_run(how: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(FailedRankError, match=message):
        launch("failing_worker.py", 2, how, timeout=120)
    assert time.monotonic() - started < 55  # the group's own time-out is 60 seconds
