"""`torch.set_default_device` moves the user's tensors, but not the engine's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard import PrivacyEngine
from dpshard.sampling import plan_micro_batches
from dpshard.sampling.loading import _padded


@pytest.fixture
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_verified_step(mode):
    with torch.device("cpu"):
        x, y = torch.randn(8, 5), torch.arange(8) % 3
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    engine = PrivacyEngine(
        model, batch_size=8, sample_size=20, steps=1, noise_multiplier=1.0, clipping_mode=mode, verify=True
    )
    losses = F.cross_entropy(model(x), y, reduction="none")
    engine.record_loss(losses)
    losses.mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert engine.metrics()["loss"] > 0
    assert all(p.isfinite().all() for p in model.parameters())
    engine.detach()


@pytest.mark.usefixtures("elsewhere")
def test_padded_rows():
    drawn = torch.arange(5, device="cpu").numpy()
    *_, last = plan_micro_batches(drawn, 0, 3)
    assert last.is_padding.tolist() == [False, False, True]
    rows = torch.ones(2, 4, device="cpu")
    assert torch.equal(_padded([rows], last)[0], torch.ones(3, 4, device="cpu"))
    assert _padded([rows.numpy()], last)[0].shape == (3, 4)
