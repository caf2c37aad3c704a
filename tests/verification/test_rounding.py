"""Verification takes rounding for rounding, however far inputs are from 1.

Failure modes: 8 test_a_fault_on_raw_columns_is_caught.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpshard.errors import VerificationError
from tests.verification.models import engine_on

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")
COLUMNS = torch.logspace(-3, 3.5, 30)
"""Sizes of the columns of an unscaled table, as in breast_cancer."""


def raw_columns(rows=16):
    return torch.rand(rows, 30) * COLUMNS


class Cosines(nn.Module):
    """Random features of columns of any size: a cosine rounds large numbers coarsely."""

    def __init__(self, features, classes, width=512):
        super().__init__()
        self.hidden, self.head = nn.Linear(features, width), nn.Linear(width, classes)
        nn.init.normal_(self.hidden.weight, std=1.7)
        nn.init.uniform_(self.hidden.bias, 0, 2 * torch.pi)

    def forward(self, x):
        return self.head(torch.cos(self.hidden(x)))


class Mixing(Cosines):
    """Subtracts a part of the mean over the samples."""

    def forward(self, x):
        return super().forward(x) - 0.05 * super().forward(x).mean(0)


def trained(build):
    """Return a model with gradients in its hidden layer, too."""
    model = build(30, 2)
    nn.init.normal_(model.head.weight)
    return model


def engine_of(ranks, model):
    engine = engine_on(model)
    engine._verifier._ranks = SimpleNamespace(rank=0, world_size=ranks)
    return engine


def verify(engine, times=1):
    for _ in range(times):
        engine.verify(raw_columns(), loss_fn=F.cross_entropy, targets=torch.arange(16) % 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_raw_columns_pass(ranks):
    for seed in range(4):
        torch.manual_seed(seed)
        verify(engine_of(ranks, trained(Cosines)))


class Casting(Cosines):
    """Casts to float32 within forward."""

    def forward(self, x):
        return super().forward(x.to(torch.float32)).float().log_softmax(1, dtype=torch.float32)


def test_raw_columns_pass_a_model_that_casts_to_float32():
    for seed in range(4):
        torch.manual_seed(seed)
        verify(engine_of(1, trained(Casting)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fault_on_raw_columns_is_caught(ranks):
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(VerificationError):
            verify(engine_of(ranks, trained(Mixing)))


class Talking(Cosines):
    """Sums a number over ranks in forward."""

    def forward(self, x):
        if x.dtype == torch.float64:
            self.figure = torch.ones(())
            dist.all_reduce(self.figure)
            self.summed = True
        return super().forward(x)


def test_no_rank_waits_for_others_in_float64():
    model = trained(Talking)
    engine = engine_of(2, model)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(VerificationError):  # float32 fails on one of a few samples
            verify(engine, times=8)
    finally:
        dist.destroy_process_group()
    assert not hasattr(model, "summed")
