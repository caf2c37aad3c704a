"""Samples that meet over ranks, in a model that gathers or reduces in forward or backward: refused on every rank.

Failure mode 12.
"""

import pytest

from tests.distributed.launch import together

FORWARD = ("ddp:global-mean", "ddp:other-ranks", "ddp:contrastive", "fsdp2:global-mean")
WAYS = ("function", "hook", "module-hook", "module-pre-hook")
BACKWARD = tuple(f"{kind}:back-{way}" for kind in ("ddp", "fsdp2") for way in WAYS)
REFUSED = FORWARD + BACKWARD
HONEST = ("ddp:", "fsdp2:")


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_reaches_over_ranks_is_refused(case: str) -> None:
    for error, message in together("company_worker.py", 2, *REFUSED)[case]:
        assert error == "ConfigurationError", message
        assert "ranks split samples, or mix" in message
        assert message.startswith(f"The {'backward' if case in BACKWARD else 'forward'} of the model calls")


@pytest.mark.parametrize("case", HONEST)
def test_a_model_that_stays_on_its_rank_trains(case: str) -> None:
    for error, message in together("company_worker.py", 2, *HONEST)[case]:
        assert error == "", message
