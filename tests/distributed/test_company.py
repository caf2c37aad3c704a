"""Samples that meet over ranks, in a model that gathers or reduces in forward: refused on every rank.

Failure mode 12.
"""

import pytest

from tests.distributed.launch import together

REFUSED = ("ddp:global-mean", "ddp:other-ranks", "ddp:contrastive", "fsdp2:global-mean")
HONEST = ("ddp:", "fsdp2:")


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_reaches_over_ranks_is_refused(case: str) -> None:
    for error, message in together("company_worker.py", 2, *REFUSED)[case]:
        assert error == "ConfigurationError", message
        assert "ranks split samples, or mix" in message


@pytest.mark.parametrize("case", HONEST)
def test_a_model_that_stays_on_its_rank_trains(case: str) -> None:
    for error, message in together("company_worker.py", 2, *HONEST)[case]:
        assert error == "", message
