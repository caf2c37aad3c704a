"""Normalisation layers against the oracle.

Failure modes: 6 (biases) every test; 12 test_statistics_over_the_batch_are_refused.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpshard.errors import DpshardError, UnsupportedParameterError
from tests.oracle import Use, assert_exact, private_step, randn


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    outer=st.lists(st.integers(1, 4), max_size=2),
    normalized=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    B=st.integers(1, 4),
    kind=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
)
def test_norms_of_trailing_dimensions(outer, normalized, B, kind):
    last = normalized[-1]
    assert_exact(Use(lambda m, x: m.norm(x), before=last, norm=kind(normalized)), randn(B, *outer, *normalized))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm(4, eps=0.1),
        nn.RMSNorm(4, eps=0.1),
        nn.RMSNorm((3, 4)),
        nn.LayerNorm((3, 4)),
    ],
    ids=str,
)
def test_options_of_trailing_norms(layer):
    assert_exact(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2)), randn(4, 3, 4))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("B", [3, 4])
def test_layouts_of_trailing_norms(kind, B):
    time_first = Use(lambda m, x: m.n(x.transpose(0, 1)).transpose(0, 1), before=4, n=kind(4))
    assert_exact(time_first, randn(B, 4, 4))
    flat = Use(lambda m, x: m.n(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (4, -1)).transpose(0, 1), n=kind(4))
    assert_exact(flat, randn(B, 4, 4))


@pytest.mark.parametrize("space", [(), (5,), (4, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm(space, groups):
    assert_exact(
        Use(lambda m, x: m.n(x * m.s), n=nn.GroupNorm(groups, 4), s=randn(4, *[1] * len(space))), randn(4, 4, *space)
    )


def test_group_norm_of_flattened_frames():
    assert_exact(
        Use(lambda m, x: m.n(x.flatten(0, 1)).unflatten(0, x.shape[:2]), n=nn.GroupNorm(2, 4)), randn(3, 4, 4, 5)
    )


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norm(kind):
    rank = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}[kind]
    space = (5, 4, 3)[:rank]
    scale = randn(4, *[1] * rank)
    assert_exact(Use(lambda m, x: m.n(x * m.s), n=kind(4, affine=True), s=scale), randn(3, 4, *space))


class FrozenBatchNorm(nn.BatchNorm2d):
    """Always in eval mode."""

    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("trainable", [("weight", "bias"), ("weight",), ("bias",)])
def test_batch_norm_with_frozen_statistics(trainable):
    norm = FrozenBatchNorm(4).train()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    for name in ("weight", "bias"):
        getattr(norm, name).requires_grad_(name in trainable)
    assert_exact(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)), randn(3, 4, 4, 4))


def test_statistics_over_the_batch_are_refused():
    with pytest.raises(
        UnsupportedParameterError, match=r"1 \(BatchNorm1d\).*Before making the engine, replace it by GroupNorm"
    ):
        private_step(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), (randn(4, 4),))
    functional = Use(lambda m, x: torch.batch_norm(x, m.w, None, None, None, True, 0.1, 1e-5, False), w=randn(4))
    with pytest.raises(DpshardError, match=r"w in the model \(Use\), function .*batch_norm"):
        private_step(functional, (randn(4, 4, 5),))
    by_function = Use(lambda m, x: nn.functional.batch_norm(x, None, None, m.w, training=True), w=randn(4))
    with pytest.raises(UnsupportedParameterError, match="BatchNorm mixes the samples"):
        private_step(by_function, (randn(4, 4, 5),))


def test_running_statistics_of_instance_norm_are_refused():
    layer = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    with pytest.raises(UnsupportedParameterError, match="use track_running_stats=False"):
        private_step(nn.Sequential(layer).double(), (randn(4, 4, 5),))
