"""A small diffusion U-Net and a recommender, in common style: exact, untouched."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.zoo import B, assert_model_exact

C = 4


class ResidualBlock(nn.Module):
    """Two convolutions, with the time as scale and shift between them."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(2 * C, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.conv2(F.silu(h)) + self.skip(x)


class Attention(nn.Module):
    """Attention over pixels, with 1x1 convolutions."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 2, c // 2, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    """Predicts the noise of images [B, 3, 8, 8] at times [B]."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(C, 2 * C), nn.SiLU(), nn.Linear(2 * C, 2 * C))
        self.first = nn.Conv2d(3, C, 3, padding=1)
        self.down1, self.shrink = ResidualBlock(C, C), nn.Conv2d(C, C, 3, stride=2, padding=1)
        self.down2, self.attention, self.middle = ResidualBlock(C, 2 * C), Attention(2 * C), ResidualBlock(2 * C, 2 * C)
        self.grow = nn.ConvTranspose2d(2 * C, C, 4, stride=2, padding=1)
        self.up, self.norm, self.last = ResidualBlock(2 * C, C), nn.GroupNorm(2, C), nn.Conv2d(C, 3, 3, padding=1)

    def forward(self, x, t):
        frequencies = torch.exp(-math.log(1e4) * torch.arange(C // 2, dtype=x.dtype) / (C // 2))
        angles = t[:, None] * frequencies[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        skip = self.down1(self.first(x), time)
        h = self.middle(self.attention(self.down2(self.shrink(skip), time)), time)
        h = self.up(torch.cat([self.grow(h), skip], dim=1), time)
        return self.last(F.silu(self.norm(h)))


def test_a_diffusion_network():
    inputs = {"x": torch.randn(B, 3, 8, 8), "t": torch.tensor([1.0, 250.0, 999.0])}
    assert_model_exact(UNet(), inputs, lambda output: output)


class Recommender(nn.Module):
    """DLRM: dense features [B, 5] and ids [B, 3 fields, 4], a table per field, pairwise interactions."""

    def __init__(self, mode, flat):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(7, C, mode=mode, padding_idx=0) for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, C))
        self.top = nn.Sequential(nn.Linear(C + 6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.flat = flat

    def forward(self, dense, ids):
        found = [self.bottom(dense)]
        for field, table in enumerate(self.tables):
            bags = ids[:, field]
            if self.flat:
                offsets = torch.arange(0, bags.numel(), bags.shape[1])
                found.append(table(bags.flatten(), offsets))
            else:
                found.append(table(bags))
        stacked = torch.stack(found, 1)
        pairs = (stacked @ stacked.mT)[:, *torch.triu_indices(4, 4, 1)]
        return self.top(torch.cat([found[0], pairs], 1))


@pytest.mark.parametrize("flat", [False, True], ids=["padded", "offsets"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_recommender(mode, flat):
    ids = torch.randint(1, 7, (B, 3, 4))
    ids[0, :, 2:] = ids[1, 0] = 0  # shorter bags, an empty one
    inputs = {"dense": torch.randn(B, 5), "ids": ids}
    assert_model_exact(Recommender(mode, flat), inputs, lambda output: output)
