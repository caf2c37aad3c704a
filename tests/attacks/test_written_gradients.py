"""Foreign code writes a gradient in place within backward, after its norm was measured and before its sum.

Failure mode 2: test_a_gradient_written_after_its_norm_is_refused.
"""

import functools

import pytest
import torch
from torch import nn

from dpshard.errors import LogicalBatchError
from dpshard.records import Offload
from tests.oracle import norm, private_step, ramp_loss, randn
from tests.records.races import SimulatedGpu

D, R = 64, 0.1


class Branches(nn.Module):
    """Sum of three branches, which all get one gradient tensor; autograd reaches `last` first."""

    def __init__(self, hook):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.hook = nn.Linear(D, D), nn.Linear(D, D), hook

    def forward(self, x):
        first = self.first(x)
        middle = x.detach().requires_grad_().tanh()
        middle.register_hook(self.hook)
        return (first + middle + self.last(x)).tanh()


def step(hook, **options):
    options = {"max_grad_norm": R, "clipping_mode": "bk", "verify": False, **options}
    return private_step(Branches(hook).double(), (randn(2, D, D),), ramp_loss, **options)


OFFLOADED = {"on the CPU": True, "left": 0, "still here": 1}


@pytest.mark.parametrize("offload", [None, *OFFLOADED])
def test_a_gradient_written_after_its_norm_is_refused(offload, monkeypatch):
    options = {} if offload is None else {"offload_records": OFFLOADED[offload]}
    if offload in ("left", "still here"):
        monkeypatch.setattr("dpshard.clipping.tape.Offload", functools.partial(Offload, gpu=lambda _: SimulatedGpu()))
    assert norm(step(lambda g: g * 1000.0, **options)) <= R * (1 + 1e-9)
    if offload == "left":  # what left is what was measured
        assert norm(step(lambda g: g.mul_(1000.0), **options)) <= R * (1 + 1e-9)
        return
    with pytest.raises(LogicalBatchError, match=r"last\.weight was used with was changed in place"):
        step(lambda g: g.mul_(1000.0), **options)
