"""The sums of a pipeline's stage.

Failure modes: 4, 19 test_a_changed_sum_is_refused_at_every_attempt.
"""

import torch
from torch import nn

from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.sharding import Unsharded
from dpshard.backends.stage_sums import WholeSums
from dpshard.errors import LogicalBatchError


def test_a_changed_sum_is_refused_at_every_attempt():
    """Later sums replace its checksum, so a script that catches the error would release it at the next attempt."""
    model = nn.Linear(3, 2, bias=False)
    sharding = Unsharded(model)
    reduction = WholeSums(sharding, DotGradStore(sharding), Communicator())
    names, of_ones = ["weight"], lambda name: torch.ones(2, 3)
    reduction.begin_late()
    reduction.add_later(names, of_ones)
    assert reduction.fault() is None
    assert model.weight.grad is not None
    model.weight.grad.data.mul_(1000)
    reduction.begin_late()
    reduction.add_later(names, of_ones)
    for _ in range(3):
        assert isinstance(reduction.fault(), LogicalBatchError)
    reduction.forget_fault()
    assert reduction.fault() is None
