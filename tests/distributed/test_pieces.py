"""Under FSDP2 the first size of the inputs shows the order of their rows to all ranks (failure mode 13)."""

import pytest
import torch

from tests.distributed.launch import together
from tests.distributed.pieces_worker import SAMPLES, R, inputs, model
from tests.oracle import TOLERANCE, clipped_mean, per_sample_gradients

CASES = "unverified", "verified first"


def released(case: str) -> list[tuple[str, list[float]]]:
    return together("pieces_worker.py", 2, *CASES)[case]


def expected(step: int) -> torch.Tensor:
    gradients = per_sample_gradients(model(), (inputs()[step],))
    return torch.cat([g.flatten() for g in clipped_mean(gradients, max_grad_norm=R, batch_size=SAMPLES).values()])


@pytest.mark.parametrize(("case", "step"), [("unverified", 0), ("verified first", 1)])
def test_all_ranks_refuse_pieces_that_no_probe_saw(case: str, step: int) -> None:
    """Rows in the order of single pieces would mix samples; a sample then counted 3.7 times."""
    for message, gradient in released(case):
        assert ("when their order was probed, there were 1" in message.lower()) == (case == "unverified")
        wanted = expected(step)
        assert (torch.tensor(gradient, dtype=wanted.dtype) - wanted).norm() <= TOLERANCE * wanted.norm()
