"""A small network in which much comes together: for tests of what must not change the update."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

V, T, D = 11, 4, 6


class Block(nn.Module):
    """A residual block, used twice in a row: a layer in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.up = nn.Linear(D, 8)
        self.down = nn.Linear(8, D)
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x)))) * (1 + self.scale)
        return x


class Network(nn.Module):
    """Tokens [B, T] to scores [B, V]: tied embedding and head, class token, positions, blocks; T = 4 tokens."""

    def __init__(self, *, blocks: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D, padding_idx=0)
        self.positions = nn.Embedding(T, D)
        self.class_token = nn.Parameter(torch.randn(1, 1, D))
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.bias = nn.Parameter(torch.randn(V))
        self.reentrant = reentrant
        """None: no activation checkpointing."""
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        x = torch.cat([self.class_token.expand(len(ids), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean(1) @ self.embedding.weight.t() + self.bias


def sentences(B: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], repeated and padding ones among them, and a class [B] for each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, T), generator=generator)
    ids[:, 2] = ids[:, 1]
    ids[0, 3] = 0
    return ids, torch.randint(0, V, (B,), generator=generator)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def every_second_product() -> tuple[Any, Any]:
    """Contexts of selective checkpointing, as torchtitan makes them: every second matrix product is kept."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += op in PRODUCTS
        kept = op in PRODUCTS and seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
