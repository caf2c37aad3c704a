"""Tokens a second of packed over padded rows, on text of mixed lengths: the paragraphs of Python's documentation.

Both train the same model on the same paragraphs, by the same mechanism: equal epsilon. Padded rows are as long as the
longest paragraph, so that shapes do not depend on the draw. Only tokens of text count. Times are CPU time of one
thread, of steps in turns; steps in which a verification is due are not counted.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpshard import Packing, PrivacyEngine
from dpshard.losses import packed_cross_entropy, sample_losses
from dpshard.sampling import load, packer, plan_steps

VOCABULARY, HEADS = 257, 4
BEGIN = 256


class Block(nn.Module):
    """A pre-norm block with attention within `mask`, or causal attention without one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return hidden states [R, T, D]."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A causal language model of bytes with tied weights."""

    def __init__(self, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(depth)), nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, positions: Tensor, units: Tensor | None = None) -> Tensor:
        """Return logits [R, T, V]; `units` [R, T]: ids of packed documents."""
        x = self.tokens(ids) + self.positions(positions)
        mask = None if units is None else (units[:, None, :, None] == units[:, None, None, :]).tril()
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.tokens.weight)


def paragraphs(length: int) -> list[Tensor]:
    """Return the paragraphs of Python's documentation as bytes after BEGIN, at most `length` tokens each."""
    texts = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    return [torch.tensor([BEGIN, *text.encode()][:length]) for text in texts if text]


def padded(length: int, batch: list[Tensor]) -> dict[str, Tensor]:
    """Collate documents to rows of `length`."""
    ids, labels = torch.zeros(len(batch), length, dtype=torch.long), torch.full((len(batch), length), -100)
    for row, x in enumerate(batch):
        ids[row, : len(x)] = labels[row, : len(x)] = x
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).repeat(len(batch), 1)}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model, of rows and of batches."""

    length: int = 512
    width: int = 128
    depth: int = 2
    rows: int = 8
    """Rows of a micro-batch."""
    units: int = 256
    """Most documents of a packed micro-batch."""
    batch: int = 32
    """Expected documents of a step."""


TINY = Size(length=48, width=16, depth=1, rows=4, units=32, batch=16)


class Training:
    """One run, step by step; ordinary training takes batches as the engine draws them, without an engine."""

    def __init__(self, docs: list[Tensor], size: Size, *, packed: bool, private: bool) -> None:
        torch.manual_seed(0)
        self.size, self.packed, self.private = size, packed, private
        self.model = GPT(size.length, size.width, size.depth)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {"batch_size": size.batch, "sample_size": len(docs), "steps": 10_000, "noise_multiplier": 1.0}
            self.engine = PrivacyEngine(self.model, **settings)
        packing = Packing(rows=size.rows, tokens=size.length, lengths=[len(x) for x in docs]) if packed else None
        most, collate = size.units if packed else size.rows, None if packed else functools.partial(padded, size.length)
        if private:
            batches = self.engine.batches(docs, most, collate_fn=collate, packing=packing)
            self.steps = (((lb.is_padding, batch) for batch in lb) for lb in batches)
            return
        self.engine.detach()
        secret = bytes(32)
        sampler = self.engine._samples.sampler(secret)
        plans = plan_steps(sampler, secret, count(), most, pack=packer(docs, packing))
        loaded = load(docs, plans, sample_size=len(docs), packed=packed, collate_fn=collate)
        by_step = groupby(loaded, lambda pair: pair[0].step)
        self.steps = (((plan.is_padding, batch) for plan, batch in pairs) for _, pairs in by_step)

    def step(self) -> tuple[int, int, float]:
        """Take a step; return its tokens of text, all tokens of its rows, and its seconds of CPU."""
        begun = time.process_time()
        tokens = room = 0
        for is_padding, batch in next(self.steps):
            text = batch["unit_ids"] >= 0 if self.packed else (batch["labels"] >= 0) & ~is_padding[:, None]
            self._loss(batch).backward()
            tokens, room = tokens + int(text.sum()), room + text.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tokens, room, time.process_time() - begun

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        units = batch.get("unit_ids")
        logits = self.model(batch["input_ids"], batch["position_ids"], units)
        if units is not None:
            return packed_cross_entropy(logits, batch["labels"], units, self.size.units).mean()
        return sample_losses(logits[:, :-1], batch["labels"][:, 1:]).mean()


def measure(size: Size, *, steps: int, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return the tokens of text a second of packed and padded rows, private and ordinary, and figures of the text."""
    docs = paragraphs(size.length)
    lengths = sorted(map(len, docs))
    runs = {
        (packed, private): Training(docs, size, packed=packed, private=private)
        for packed in (True, False)
        for private in (True, False)
    }
    found: dict[tuple[bool, bool], list[tuple[int, int, float]]] = {key: [] for key in runs}
    for step in range(steps):
        for key, run in runs.items():
            taken = run.step()
            if step & (step - 1):  # verification is due at steps 0, 1, 2, 4, ...
                found[key].append(taken)
            on_step()
    rows = [
        {
            "packed": packed,
            "private": private,
            "tokens_per_second": median(tokens / seconds for tokens, _, seconds in figures),
            "fill": sum(tokens for tokens, _, _ in figures) / sum(room for _, room, _ in figures),
        }
        for (packed, private), figures in found.items()
    ]
    text = {"documents": len(docs), "mean": sum(lengths) / len(docs), "median": lengths[len(docs) // 2]}
    return {"size": asdict(size), "text": text, "rows": rows, "timed_steps": len(found[True, True])}
