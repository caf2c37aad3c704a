"""Stochastic depth that drops samples instead of masking them, as in DINOv2: exact for the given draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import MODES, TOLERANCE, clipped_mean, gradients_of, noise_free_engine, norm, randn, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")

B, T, D = 6, 4, 6


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(D, 3 * D), nn.Linear(D, D), fused

    def forward(self, x):
        N, T, _ = x.shape
        qkv = self.qkv(x).reshape(N, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(*qkv.unbind(0))
        else:
            q, k, v = qkv[0] * (D // 2) ** -0.5, qkv[1], qkv[2]
            y = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(N, T, D))


def on_a_subset(x, residual):
    """Return x + residual(x) for half of the samples, with twice the weight."""
    b = len(x)
    k = max(int(b * 0.5), 1)
    chosen = (torch.randperm(b))[:k]
    added = residual(x[chosen]).flatten(1)
    return torch.index_add(x.flatten(1), 0, chosen, added.to(x.dtype), alpha=b / k).view_as(x)


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attention, self.scale = Attention(fused), nn.Parameter(torch.rand(D))
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x):
        x = on_a_subset(x, lambda y: self.attention(self.norms[0](y)) * self.scale)
        return on_a_subset(x, lambda y: self.mlp(self.norms[1](y)))


def losses_of(model, x):
    torch.manual_seed(3)
    return (model(x).mean(1).sin() * torch.linspace(0.5, 1.5, D)).sum(1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_exact(mode, fused):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D), Block(fused), Block(fused)).double(), randn(B, T, D)
    parameters, losses = dict(model.named_parameters()), losses_of(model, x)
    per_sample = []
    for loss in losses:
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), found, strict=True)]
        per_sample.append(dict(zip(parameters, zeros, strict=True)))
    R = sorted(norm(g) for g in per_sample)[B // 2] * 0.999
    noise_free_engine(model, batch_size=B, max_grad_norm=R, clipping_mode=mode)
    losses_of(model, x).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=B)
    assert relative_error(gradients_of(model), expected) <= TOLERANCE
