"""Networks for encoded tables."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dpshard.config import require_choice

NetworkName = Literal["linear", "mlp"]

PIECES = 4
WIDTH = 128


def make_network(name: str, features: int, numbers: int, outputs: int) -> nn.Module:
    """Return a network from features [B, F] to outputs [B, O]; the first `numbers` lie in [-1, 1]."""
    require_choice("model", name, get_args(NetworkName))
    return Linear(features, outputs) if name == "linear" else MLP(features, numbers, outputs)


class Linear(nn.Module):
    """A linear map."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(features, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return [B, O]."""
        return self.head(x_BF)


class MLP(nn.Module):
    """One hidden layer on piecewise linear embeddings of numbers (Gorishniy et al. 2022, arXiv:2203.05556, Sec. 3.1).

    Their pieces have equal length, because quantiles are private.
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
        """Return [B, O]."""
        split_BNP = ((x_BF[:, : self.numbers, None] - self.edges) * (PIECES / 2)).clamp(0, 1)
        x = torch.cat([x_BF, split_BNP.flatten(1)], dim=1)
        return self.head(torch.relu(self.hidden(x)))
