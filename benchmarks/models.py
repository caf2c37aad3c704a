"""The trained models. Parameters sit in modules with the samples in their input, as Opacus requires."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return hidden states [B, T, D]."""
        qkv = self.qkv(self.norm_1(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTK = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=self.causal)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """GPT-2, with ids of positions per sample."""

    def __init__(self, *, width: int, layers: int, heads: int, vocabulary: int, length: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return scores [B, T, V]."""
        at_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(len(ids_BT), 1)
        x_BTD = self.tokens(ids_BT) + self.positions(at_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Start(nn.Module):
    """The class token in front of the patches, and positions."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return hidden states [B, T + 1, D]."""
        return torch.cat([self.token.expand(len(x_BTD), -1, -1), x_BTD], 1) + self.positions


class ViT(nn.Module):
    """A vision transformer."""

    def __init__(
        self, *, width: int, layers: int, heads: int, image: int, patch: int, classes: int, hidden: int | None = None
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.start = Start((image // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, hidden=hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [B, classes] of images [B, 3, H, W]."""
        x_BTD = self.start(self.patches(x).flatten(2).mT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD)[:, 0])


def cnn(*, width: int, classes: int) -> nn.Sequential:
    """Return six convolutions with GroupNorm over images [B, 3, H, W]; scores [B, classes]."""

    def layer(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]

    D = width
    layers = [*layer(3, D), *layer(D, D), *layer(D, 2 * D, 2), *layer(2 * D, 2 * D)]
    layers += [*layer(2 * D, 4 * D, 2), *layer(4 * D, 4 * D)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * D, classes))


def mlp(*, inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Return two linear layers, inputs - width - outputs."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped key-value heads, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, rotation_TK: Tensor) -> Tensor:
        """Return hidden states [B, T, D]; `rotation_TK` are the angles of T positions."""
        h = self.norm_1(x_BTD)
        q, k, v = (m(h).unflatten(2, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = _rotated(q, rotation_TK), _rotated(k, rotation_TK)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).flatten(2))
        h = self.norm_2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, -1)
    cos, sin = angles_TK.cos().to(x_BHTK.dtype), angles_TK.sin().to(x_BHTK.dtype)
    return x_BHTK * cos + torch.cat([-right, left], -1) * sin


class Llama(nn.Module):
    """A Llama-like language model, tied."""

    def __init__(self, *, width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return scores [B, T, V]."""
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        speed_K = 500_000.0 ** -(torch.arange(0, self.size, 2, device=ids_BT.device) / self.size)
        angles_TK = torch.outer(place_T, speed_K).repeat(1, 2)
        x_BTD = self.tokens(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, angles_TK)
        return self.head(self.norm(x_BTD))
