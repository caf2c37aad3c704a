"""A transformer in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, attend_BT: Tensor | None = None) -> Tensor:
        """Return [B, T, D]; ignore positions where `attend_BT` is False."""
        qkv = self.qkv(x_BTD).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if attend_BT is None else attend_BT[:, None, None, :]
        y_BHTK = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=mask, is_causal=self.causal)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x_BTD: Tensor, attend_BT: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD), attend_BT)
        return x_BTD + self.mlp(self.norm_2(x_BTD))


class GPT(nn.Module):
    """A causal language model; without a `head`, embeddings are tied."""

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, block: Callable[[], Block], *, head: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False) if head else None
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] of ids [B, T]."""
        h_BTD = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h_BTD = block(h_BTD)
        h_BTD = self.norm(h_BTD)
        return self.head(h_BTD) if self.head is not None else F.linear(h_BTD, self.tokens.weight)


class ViT(nn.Module):
    """The vision transformer of Dosovitskiy et al. 2021, arXiv:2010.11929, without its head."""

    def __init__(
        self, channels: int, pixels: tuple[int, int], patch: int, width: int, depth: int, block: Callable[[], Block]
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (pixels[0] // patch) * (pixels[1] // patch), width))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def hidden(self, x_BCHW: Tensor) -> Tensor:
        """Return hidden states [B, T, D], of the class token first."""
        h_BTD = self.patches(x_BCHW).flatten(2).mT
        h_BTD = torch.cat([self.class_token.expand(len(h_BTD), -1, -1), h_BTD], 1) + self.positions
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.norm(h_BTD)
