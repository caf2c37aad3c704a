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


def expected(model, docs, *, groups=None, loss=alone):
    """Return the threshold that clips half of the documents, and the update of one step over all of them."""
    gradients = per_document(model, docs, loss)
    threshold = half_clipped(gradients)
    return threshold, clipped_mean(gradients, max_grad_norm=threshold, batch_size=len(docs), groups=groups)


def step(model, docs, threshold, *, packing=PACKING, units=U, call=None, forward=None, **options):
    """The update of one noise-free step over all documents, packed."""
    engine = noise_free_engine(
        model, **{"batch_size": len(docs), "sample_size": len(docs), "max_grad_norm": threshold, **options}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    forward = forward or (lambda batch: (call or model)(*inputs(batch)))
    try:
        for logical_batch in engine.batches(docs, units, packing=packing):
            for batch in logical_batch:
                losses = unit_losses(forward(batch), batch, units)
                (losses.sum() if options.get("loss_reduction") == "sum" else losses.mean()).backward()
            optimizer.step()
        return gradients_of(model)
    finally:
        engine.detach()
        model.zero_grad()
