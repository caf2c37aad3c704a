"""Loops that move or mask rows are refused on all ranks where one has padding; without padding they are exact."""

import torch

from tests.distributed.launch import launch

REFUSED = {
    "ddp:shuffled": "other values than its last sample",
    "ddp:masked": "loss.mean()",
    "fsdp2:reversed": "other values than its last sample",
    "fsdp2:masked": "loss.mean()",
}
EXACT = ("ddp:", "ddp:unpadded-reversed", "fsdp2:", "fsdp2:unpadded-shuffled")


def test_ranks_refuse_together_and_unpadded_rows_may_be_in_any_order() -> None:
    for results in launch("rows_worker.py", 2, *REFUSED, *EXACT):
        for (told, moved), text in zip(results, REFUSED.values(), strict=False):
            assert text in told
            assert not any(x for row in moved for x in row)
        honest, *others = results[len(REFUSED) :]
        assert honest[0] == ""
        for told, moved in others:
            assert told == ""
            for row, expected in zip(moved, honest[1], strict=True):
                torch.testing.assert_close(torch.tensor(row), torch.tensor(expected), rtol=1e-4, atol=1e-5)
