"""Records of a vocabulary head in chunks, which compute its logits again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod
from dpshard.kernels.underflow import hidden as hidden_by_underflow
from dpshard.losses.head import Head, Positions, rho, rho_at, without_autocast
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.numerics import gram, gram_bound, norms, wide, zero_rows
from dpshard.records.outer_product import OuterProduct


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """Gradient sum_t rho_t (x) cols_t of a weight [V, D], or of a bias [V]; see [Note: A head in chunks]."""

    hidden: Tensor
    """[B, T, D]"""
    labels: Tensor
    """[B, T]"""
    scale: Tensor
    """[B, T]: u_t times the gradient of the position's loss"""
    head: Head
    at: Positions
    shape: torch.Size
    """[V, D] or [V]"""

    @property
    def cols(self) -> Tensor:
        """[B, T, D], or [B, T, 1] for a bias."""
        scale = self.scale[..., None]
        return scale if len(self.shape) == 1 else wide(self.hidden.to(self.head.dtype)) * scale

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], by the forward's Gram matrices or in chunks of classes."""
        cols, known = self.cols, self.at.gram
        scale_B = self.scale_of_terms()
        if known is None or method is NormMethod.INSTANTIATE:
            parts = (norms(rows.mT @ cols).square() for _, rows in self._rows())
            return gram_bound(functools.reduce(torch.add, parts), scale_B)
        T = known.shape[-1]
        safe = known.clone()
        safe.diagonal(0, 1, 2).add_(hidden_by_underflow(T * self.shape[0], safe.dtype))
        products = gram(cols).mul_(safe).sum((1, 2)) + hidden_by_underflow(T * T, safe.dtype)
        return gram_bound(products, scale_B)

    def scale_of_terms(self) -> Tensor:
        """Sum of the norms [B] of the terms, or a little more."""
        return norms(self.cols, 2).sum(1) * 2**0.5

    def _rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield classes, and rho [B, T, c]."""
        with without_autocast(self.hidden.device):
            for classes in self.head.chunks():
                yield classes, rho(self.at, self.head, self.hidden, self.labels, classes)

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return self.outer().per_sample()

    def clipped_sum(self, sum_weight_B: Tensor) -> Tensor:
        """Weighted sum of the gradients, [*shape]."""
        cols = self.cols
        cols_ND = (cols * sum_weight_B.to(cols.dtype)[:, None, None]).flatten(0, 1)
        total = cols_ND.new_empty(self.shape[0], cols_ND.shape[1])
        for classes, rows in self._rows():
            torch.mm(rows.flatten(0, 1).T, cols_ND, out=total[classes])
        return total.view(self.shape)

    def inner_gather(self, gather: EmbeddingRecord) -> Tensor:
        """Inner products [B] with a tied embedding: <sum_t rho_t[id_t'] cols_t, values_t'>."""
        values, ids = gather.read(), gather.ids.clamp(min=0)
        with without_autocast(self.hidden.device):
            picked_BTt = rho_at(self.at, self.head, self.hidden, self.labels, ids)
        products = (picked_BTt.mT @ self.cols) * values
        return products.sum((1, 2)) + hidden_by_underflow(products[0].numel(), products.dtype)

    def outer(self) -> OuterProduct:
        """Return the gradient as rows and columns."""
        rows = torch.cat([rows for _, rows in self._rows()], 2)
        return OuterProduct(rows[:, None], self.cols[:, None], self.shape)

    def real(self) -> HeadRecord:
        """Return real pairs for complex numbers."""
        return self

    def without(self, nonfinite_B: Tensor) -> HeadRecord:
        """Zero the samples `nonfinite_B`."""
        # With an infinite top, the other logits have probability zero.
        top = self.at.top.masked_fill(nonfinite_B[:, None], torch.inf)
        total = self.at.total.masked_fill(nonfinite_B[:, None], 1)
        at = Positions(self.at.label_logit, top, total, None, None, self.at.label_slope)
        hidden, scale = zero_rows(self.hidden, nonfinite_B), zero_rows(self.scale, nonfinite_B)
        return replace(self, hidden=hidden, scale=scale, at=at)
