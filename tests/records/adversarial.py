"""Records of one sample at the limits of floats, with the exact norms of their gradients."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import torch
from torch import Tensor

from dpshard.records import Convolution, EmbeddingRecord, OuterProduct, PerSampleGrad, Record, RoutedProduct

KINDS = (
    *("product", "convolution", "embedding", "gradient", "routed"),
    *("tied", "product and gradient", "two products", "embedding and gradient", "routed and embedding"),
)


class Adversary:
    """Draws records with elements from 1e-45 to 3e38 side by side, and sums that cancel."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])

    def records(self, kind: str) -> list[Record]:
        """Return the records of one parameter."""
        pick = self.random.choice
        shape = pick([1, 3, 20]), pick([1, 3, 400])
        if kind == "product":
            rows = pick([1, 2, 5, 30, 400, 3000])
            return [self.product(rows, pick([1, 3, 30] if rows > 400 else [1, 3, 30, 400]), pick([1, 1, 2]))]
        if kind == "convolution":
            return [self.convolution()]
        makers = {
            "embedding": (self.embedding,),
            "gradient": (self.gradient,),
            "routed": (self.routed,),
            "tied": (self.product, self.embedding),
            "product and gradient": (self.product, self.gradient),
            "two products": (self.product, self.column),
            "embedding and gradient": (self.embedding, self.gradient),
            "routed and embedding": (self.routed, self.embedding),
        }[kind]
        return [make(*shape) for make in makers]

    def vectors(self, exponents: list[float], n: int) -> Tensor:
        """Return vectors [T, n] of about these powers of ten."""
        x = torch.randn(len(exponents), n, generator=self.generator, dtype=torch.float64)
        kind = self.random.randrange(4)
        if kind == 0:
            x = x.sign()
        elif kind == 1:
            x = torch.ones_like(x)
        elif kind == 2:
            wide = self.random.choice([1, 4, 10])
            x = x * 10 ** (wide * torch.randn(x.shape, generator=self.generator, dtype=torch.float64))
        x = x * 10.0 ** torch.tensor(exponents, dtype=torch.float64)[:, None]
        return x.clamp(-3e38, 3e38).to(self.dtype)

    def pair(self, T: int, R: int, C: int) -> tuple[Tensor, Tensor]:
        """Return rows [T, R] and columns [T, C] of any sizes; their products are often ordinary numbers."""
        uniform, target = self.random.uniform, self.random.uniform(-25, 25)
        of_rows = [uniform(-40, 30)] * T if self.random.random() < 0.5 else [uniform(-40, 30) for _ in range(T)]
        of_cols = [target - x for x in of_rows] if self.random.random() < 0.8 else [uniform(-40, 30) for _ in range(T)]
        rows = self.vectors(of_rows, R)
        cols = self.vectors([min(38.0, max(-44.0, x)) for x in of_cols], C)
        if T > 1 and self.random.random() < 0.4:  # positions that oppose others
            half, off = T // 2, self.random.choice([0, 1e-7, 1e-5, 1e-3, 1e-2])
            rows[half : 2 * half] = rows[:half]
            cols[half : 2 * half] = -(cols[:half].double() * (1 + off)).to(cols.dtype)
        elif T > 1 and self.random.random() < 0.3:
            rows[:] = rows[:1]
        return rows, cols

    def product(self, R: int, C: int, G: int = 1) -> OuterProduct:
        """Return a product of 1 to 40 positions."""
        T = self.random.choice([1, 1, 2, 3, 17, 40])
        rows, cols = zip(*(self.pair(T, R, C) for _ in range(G)), strict=True)
        return OuterProduct(torch.stack(rows)[None], torch.stack(cols)[None], torch.Size((G * R, C)))

    def column(self, R: int, C: int) -> OuterProduct:
        """Return a product with a gradient of one column, of a parameter [R, C]."""
        return replace(self.product(R * C, 1), shape=torch.Size((R, C)))

    def embedding(self, V: int, C: int) -> EmbeddingRecord:
        """Return reads of 1 to 9 rows, some repeated, others unread."""
        T = self.random.choice([1, 2, 9])
        ids = torch.randint(-1, V, (1, T), generator=self.generator)
        values = self.vectors([self.random.uniform(-44, 30)] * T, C)
        if T > 1 and self.random.random() < 0.4:
            values[1] = -values[0] * (1 + self.random.choice([0, 1e-6, 1e-3]))
        return EmbeddingRecord(ids, values[None], torch.Size((V, C)))

    def gradient(self, R: int, C: int) -> PerSampleGrad:
        """Return a plain gradient."""
        return PerSampleGrad(self.vectors([self.random.uniform(-44, 30)], R * C).view(1, R, C))

    def routed(self, R: int, C: int) -> RoutedProduct:
        """Return a product of up to 12 rows of up to 3 experts."""
        N, G = self.random.choice([1, 4, 12]), 1
        rows, cols = self.pair(N, R, C)
        group = torch.randint(0, G, (N,), generator=self.generator)
        return RoutedProduct(rows, cols, torch.zeros(N, dtype=torch.long), group, 1, torch.Size((G * R, C)))

    def convolution(self) -> Convolution:
        """Return a convolution in one or two dimensions."""
        pick = self.random.choice
        rank, G, images, C, P = pick([1, 2]), pick([1, 2]), pick([1, 2]), pick([1, 3, 64]), pick([1, 2, 8, 20, 64])
        n, kernel, padding, stride = pick([3, 4, 7]), pick([1, 2, 3]), pick([0, 1]), pick([1, 2])
        space, positions = (n,) * rank, ((n + 2 * padding - kernel) // stride + 1,) * rank
        gradient, input = self.pair(images, G * P * math.prod(positions), G * C * math.prod(space))
        return Convolution(
            input.view(1, images, G * C, *space),
            gradient.view(1, images, G * P, *positions),
            torch.Size((G * P, C, *[kernel] * rank)),
            *[(size,) * rank for size in (stride, padding, 1)],
            G,
        )


def exact_norm(records: list[Record]) -> float:
    """Return the norm of the sum of the gradients, in float64, where squares of all float32 are normal."""
    return float(sum((_gradient(record) for record in records[1:]), _gradient(records[0])).norm())


def _gradient(record: Record) -> Tensor:
    tensors = {field.name: getattr(record, field.name) for field in fields(record)}
    wide = {name: x.double() for name, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()}
    record = replace(record, **wide)
    if isinstance(record, Convolution):
        record = record.outer()
    if isinstance(record, OuterProduct):
        return torch.einsum("bgtr,bgtc->bgrc", record.rows, record.cols).flatten()
    return record.per_sample().flatten()
