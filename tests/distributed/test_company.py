"""Samples that meet over ranks, in a model that gathers or reduces in forward: refused on every rank.

PITFALLS row 12.
"""

from tests.distributed.launch import launch

REFUSED = ("ddp:global-mean", "ddp:other-ranks", "ddp:contrastive", "fsdp2:global-mean")


def test_a_model_that_reaches_over_ranks_is_refused() -> None:
    for results in launch("company_worker.py", 2, *REFUSED):
        for case, (error, message) in zip(REFUSED, results, strict=True):
            assert error == "ConfigurationError", (case, message)
            assert "samples are split over ranks, or meet" in message, (case, message)


def test_a_model_that_stays_on_its_rank_trains() -> None:
    for results in launch("company_worker.py", 2, "ddp:", "fsdp2:"):
        for error, message in results:
            assert error == "", message
