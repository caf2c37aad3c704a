"""Loops that move or mask rows are refused on all ranks where one has padding; without padding they are exact."""

from typing import Any

import pytest
import torch

from tests.distributed.launch import together

REFUSED = {
    "ddp:shuffled": "they reached the model with other values",
    "ddp:masked": "loss.mean()",
    "fsdp2:reversed": "they reached the model with other values",
    "fsdp2:masked": "loss.mean()",
}
HONEST = ("ddp:", "fsdp2:")
EXACT = ("ddp:unpadded-reversed", "fsdp2:unpadded-shuffled")


def found(case: str) -> list[Any]:
    return together("rows_worker.py", 2, *REFUSED, *HONEST, *EXACT)[case]


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_refuse_padded_rows_together(case: str) -> None:
    for told, moved in found(case):
        assert REFUSED[case] in told
        assert not any(x for row in moved for x in row)


@pytest.mark.parametrize("case", [*HONEST, *EXACT])
def test_unpadded_rows_may_be_in_any_order(case: str) -> None:
    for (told, moved), (_, expected) in zip(found(case), found("ddp:"), strict=True):
        assert told == ""
        assert any(x for row in expected for x in row)
        for row, wanted in zip(moved, expected, strict=True):
            torch.testing.assert_close(torch.tensor(row), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
