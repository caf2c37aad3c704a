"""Rows that the data picks (unpadded sequences) belong to no sample that their shape could tell: refused.

PITFALLS row: 8 (a use that cannot be told apart by sample raises, and names parameter, function and what to do).
"""

import pytest
import torch
from torch import Tensor, nn

from dpshard.errors import UnsupportedParameterError
from tests.oracle import noise_free_engine

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")


class Unpadded(nn.Module):
    """Drops padded positions before a layer, as attention over variable lengths does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "mask":
            rows = x[mask] * 2
        elif self.how == "nonzero":
            rows = x[mask.nonzero(as_tuple=True)]
        else:
            rows = torch.tanh(x)
        rows = self.second(rows)
        return rows[mask].sum() / len(x) if self.how == "after" else rows.sum() / len(x)


@pytest.mark.parametrize("how", ["mask", "nonzero"])
def test_rows_picked_before_a_parameter_are_refused(how):
    model = Unpadded(how)
    noise_free_engine(model, batch_size=4, verify=False)
    mask = torch.arange(5) < torch.tensor([[5], [5], [5], [5]])
    with pytest.raises(UnsupportedParameterError, match=r"second.*picked the rows.*mask what comes out"):
        model(torch.randn(4, 5, 3), mask)


def test_rows_picked_after_the_last_parameter_are_fine():
    model = Unpadded("after")
    noise_free_engine(model, batch_size=4)
    mask = torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    model(torch.randn(4, 5, 3), mask).backward()
    assert model.second.weight.grad is not None
