"""The engine with kernels: half-precision training, every kind of norm."""

from unittest import mock

import pytest
import torch
from torch import nn

from dpshard.kernels import triton
from dpshard.kernels.triton import tiles
from tests.kernels.triton.support import DEVICE, skip_without_kernels
from tests.oracle import clipped_mean, norm, per_sample_gradients, private_step, ramp_loss, relative_error

skip_without_kernels()

KERNELS = ("ghost_norm_sq", "gradient_norm_sq", "per_sample", "weighted_sum")
B, T = 3, 40


class Network(nn.Module):
    """Two linear maps of positions; the first of them twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 33)

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        ("bk", {"ghost_norm_sq", "weighted_sum"}),
        ("per-example", {"per_sample"}),
        ("ghost", {"ghost_norm_sq", "weighted_sum"}),
        ("fast-gradient", {"gradient_norm_sq", "weighted_sum"}),
    ],
)
def test_a_step_with_kernels_is_the_step_without_and_the_oracles(mode, used):
    torch.manual_seed(0)
    model, x = Network().to(DEVICE, torch.bfloat16), torch.randn(B, T, 20, device=DEVICE, dtype=torch.bfloat16)

    def loss(output):
        return ramp_loss(output.float())

    oracle = per_sample_gradients(model, [x], loss)
    bound = sorted(norm(g) for g in oracle)[1]
    options = {"max_grad_norm": bound, "clipping_mode": mode, "loss": loss}
    called = set()

    def watched(name):
        operator = getattr(triton, name)

        def call(*arguments):
            called.add(name)
            return operator(*arguments)

        return mock.patch.object(triton, name, call)

    # Half-precision parameters round their gradients, so compare the sums.
    with mock.patch.object(tiles, "MANY", 1):
        patches = [watched(name) for name in KERNELS]
        for patch in patches:
            patch.start()
        try:
            found = wide_step(model, x, **options)
        finally:
            for patch in patches:
                patch.stop()
    assert called == used
    with mock.patch.dict("os.environ", {"DPSHARD_TRITON": "0"}):
        reference = wide_step(model, x, **options)
    assert relative_error(found, reference) < 1e-5
    assert relative_error(found, clipped_mean(oracle, max_grad_norm=bound, batch_size=B)) < 0.02  # bfloat16


def wide_step(model, x, **options):
    """Return the private gradients before they are rounded to the parameters' dtype."""
    sums = {}

    def release_(self, shards, *, step, std, divisor=1.0):
        sums.update({shard.name: shard.local / divisor for shard in shards})
        return torch.zeros((), dtype=torch.float64)

    with mock.patch("dpshard.noise.keyed.KeyedGaussian.release_", release_):
        private_step(model, [x], **options)
    return sums
