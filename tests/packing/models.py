"""A language model on packed rows, documents of mixed lengths, and the gradient of each document alone."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpshard import Packing
from dpshard.losses import packed_cross_entropy
from tests.oracle import clipped_mean, gradients_of, noise_free_engine, norm

V, D, T, R = 17, 8, 12, 2
U = 10
"""Most units of a micro-batch."""
LENGTHS = (5, 3, 12, 7, 2, 9, 4, 6)
PACKING = Packing(rows=R, tokens=T)


def documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (n,), generator=generator) for n in lengths]


class LanguageModel(nn.Module):
    """Tied head, position table, norms with and without a rule of their own, and attention within a unit."""

    def __init__(self, *, segments=True, positions=True, checkpoints=False, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.segments, self.positions, self.checkpoints = segments, positions, checkpoints
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.rms = nn.Parameter(torch.rand(D)), nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        self.to(dtype)

    def forward(self, ids, positions, unit_ids):
        x = self.tokens(ids) + self.places(positions if self.positions else torch.arange(ids.shape[1])[None])
        normed = self.norm(x)
        joint = checkpoint(self.qkv, normed, use_reentrant=False) if self.checkpoints else self.qkv(normed)
        q, k, v = joint.chunk(3, -1)
        same = unit_ids[:, :, None] == unit_ids[:, None, :] if self.segments else torch.ones(1, 1, 1, dtype=torch.bool)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=same.expand(len(ids), *[ids.shape[1]] * 2).tril())
        return self.head(self.rms(x + self.out(attended) * self.gate))


class Block(nn.Module):
    """Attention within a unit, and a map, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate = nn.Parameter(torch.rand(D))

    def forward(self, x, mask):
        attended = F.scaled_dot_product_attention(*self.qkv(self.norm(x)).chunk(3, -1), attn_mask=mask)
        return x + self.out(attended).tanh() * self.gate


class Blocks(nn.Module):
    """Two blocks between an embedding and a tied head."""

    def __init__(self, *, segments=True, checkpoints=False):
        super().__init__()
        torch.manual_seed(0)
        self.segments, self.checkpoints = segments, checkpoints
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, ids, positions, unit_ids):
        x = self.tokens(ids) + self.places(positions)
        same = unit_ids[:, :, None] == unit_ids[:, None, :] if self.segments else x.new_ones(1, 1, 1, dtype=torch.bool)
        mask = same.expand(len(ids), *[ids.shape[1]] * 2).tril()
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpoints else block(x, mask)
        return self.head(self.norm(x))


def groups_of(model, style):
    """The clipping groups of a style: names of parameters."""
    label = {
        "all-layer": lambda name: "",
        "layer-wise": lambda name: name.rpartition(".")[0],
        "block-wise": lambda name: name[: len("blocks.0.")] if name.startswith("blocks.") else "rest",
        "param-wise": lambda name: name,
    }[style]
    groups = {}
    for name, _ in model.named_parameters():
        groups.setdefault(label(name), []).append(name)
    return list(groups.values())


def inputs(batch):
    return batch["input_ids"], batch["position_ids"], batch["unit_ids"]


def unit_losses(logits, batch, units=U):
    return packed_cross_entropy(logits, batch["labels"], batch["unit_ids"], units)


def alone(model, ids):
    """The loss of one document, by plain torch: what its gradient is the gradient of."""
    n = len(ids)
    logits = model(ids[None], torch.arange(n)[None], torch.zeros(1, n, dtype=torch.long))
    return F.cross_entropy(logits[0, :-1], ids[1:])


def per_document(model, docs, loss=alone):
    parameters = [p for p in model.parameters() if p.requires_grad]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    found = []
    for ids in docs:
        gradients = torch.autograd.grad(loss(model, ids), parameters, allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        found.append(dict(zip(names, zeros, strict=True)))
    return found


def half_clipped(gradients):
    return sorted(norm(g) for g in gradients)[len(gradients) // 2] * 0.999


def expected(model, docs, *, groups=None, loss=alone, clipping_fn="abadi"):
    """Return the threshold that clips half of the documents, and the update of one step over all of them."""
    gradients = per_document(model, docs, loss)
    threshold = half_clipped(gradients)
    settings = {"groups": groups, "clipping_fn": clipping_fn}
    return threshold, clipped_mean(gradients, max_grad_norm=threshold, batch_size=len(docs), **settings)


def step(model, docs, threshold, *, packing=PACKING, units=U, call=None, forward=None, num_workers=0, **options):
    """The update of one noise-free step over all documents, packed."""
    engine = noise_free_engine(
        model, **{"batch_size": len(docs), "sample_size": len(docs), "max_grad_norm": threshold, **options}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    forward = forward or (lambda batch: (call or model)(*inputs(batch)))
    try:
        for logical_batch in engine.batches(docs, units, packing=packing, num_workers=num_workers):
            for batch in logical_batch:
                losses = unit_losses(forward(batch), batch, units)
                (losses.sum() if options.get("loss_reduction") == "sum" else losses.mean()).backward()
            optimizer.step()
        return gradients_of(model)
    finally:
        engine.detach()
        model.zero_grad()
