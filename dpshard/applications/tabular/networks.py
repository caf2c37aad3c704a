"""Networks for encoded tables: linear, or one hidden layer, on numbers that are split into pieces."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dpshard.config import require_choice

NetworkName = Literal["linear", "mlp"]

PIECES = 4
"""Pieces of [-1, 1] for every number."""
WIDTH = 128


def make_network(name: str, features: int, numbers: int, outputs: int) -> nn.Module:
    """Return a network from features [B, F], whose first `numbers` lie in [-1, 1], to outputs [B, O].

    "linear" is a linear map of the features, "mlp" one hidden layer.
    """
    require_choice("model", name, get_args(NetworkName))
    return Linear(features, outputs) if name == "linear" else MLP(features, numbers, outputs)


class Linear(nn.Module):
    """A linear map, which starts at 0."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(features, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return outputs [B, O]."""
        return self.head(x_BF)


class MLP(nn.Module):
    """One hidden layer on piecewise linear embeddings of numbers; they have no parameters, which would need noise.

    Gorishniy et al. 2022, arXiv:2203.05556, Sec. 3.1; pieces of equal length, because quantiles are private.
    """

    def __init__(self, features: int, numbers: int, outputs: int) -> None:
        super().__init__()
        self.numbers = numbers
        edges = torch.linspace(-1, 1, PIECES + 1)[:-1]
        self.edges: Tensor
        self.register_buffer("edges", edges, persistent=False)
        self.hidden = nn.Linear(features + numbers * PIECES, WIDTH)
        self.head = nn.Linear(WIDTH, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return outputs [B, O]."""
        split_BNP = ((x_BF[:, : self.numbers, None] - self.edges) * (PIECES / 2)).clamp(0, 1)
        x = torch.cat([x_BF, split_BNP.flatten(1)], dim=1)
        return self.head(torch.relu(self.hidden(x)))
