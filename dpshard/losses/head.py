"""The cross-entropy of a vocabulary head, a chunk of classes at a time: no logits [B, T, V] exist.

[Note: A head in chunks]
Let l_tv be the logits of position t, and y its label. Let m be the largest logit except the label's, and S the sum of
exp(l_tv - m) over v != y. The gradient of position t's loss by its logits is

    u_t rho_t,    rho_tv = exp(l_tv - m) / S for v != y,  rho_ty = -1,    u_t = 1 - softmax_y.

rho_t is exact to a few roundings, where a difference of softmax and one-hot label would cancel. All sums are rescaled
as m changes (Milakov & Gimelshein 2018, arXiv:1805.02867). A cap c makes l = c tanh(z / c) of the product z. It
multiplies rho_tv by its slope, cosh(z_tv / c)^-2 <= 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpshard.errors import DataError, LogicalBatchError

_CHUNK = 2**22
"""Logits of a chunk: 16 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Head:
    """A linear map to V classes."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None
    """[V]"""
    dtype: torch.dtype
    """Dtype of products: autocast's, or that of the input."""
    chunk: int
    softcap: float | None = None
    """The cap c, or None."""
    versions: tuple[int, ...] | None = None
    """Versions of weight and bias in forward, because gradients need the same logits. None: not compared."""

    def chunks(self) -> Iterator[slice]:
        """Yield the chunks of classes."""
        V = len(self.weight)
        return (slice(start, min(start + self.chunk, V)) for start in range(0, V, self.chunk))

    def versions_now(self) -> tuple[int, ...]:
        """Return the current versions of weight and bias."""
        return tuple(x._version for x in (self.weight, self.bias) if x is not None)

    def logits(self, hidden_BTD: Tensor, classes: slice) -> Logits:
        """Return logits [B, T, c] of a chunk, float32 or wider, rounded as the product's dtype rounds them."""
        if self.versions is not None and self.versions_now() != self.versions:
            raise written_weights_error()
        product = hidden_BTD.to(self.dtype) @ self.weight[classes].to(self.dtype).T
        if self.bias is not None:
            product = product + self.bias[classes].to(self.dtype)
        return self._capped(wide(product))

    def logits_at(self, hidden_BTD: Tensor, ids_BK: Tensor) -> Logits:
        """Return logits [B, T, K] for K classes of each sample."""
        product = hidden_BTD.to(self.dtype) @ self.weight[ids_BK].to(self.dtype).mT
        if self.bias is not None:
            product = product + self.bias[ids_BK].to(self.dtype)[:, None]
        return self._capped(wide(product))

    def _capped(self, product: Tensor) -> Logits:
        if self.softcap is None:
            return Logits(product, None)
        # Not 1 - tanh^2: it would cancel.
        return Logits(torch.tanh(product / self.softcap) * self.softcap, torch.cosh(product / self.softcap).pow(-2))


def written_weights_error() -> LogicalBatchError:
    """Return the error for weights that changed after the forward."""
    return LogicalBatchError(
        "The weight or bias of chunked_cross_entropy was written between forward and backward; its gradient "
        "needs those of the forward. Step, load or average weights after the backward."
    )


class Logits(NamedTuple):
    """Logits, and the slopes of their cap."""

    values: Tensor
    slopes: Tensor | None
    """Slopes, in the shape of `values`; None without a cap."""

    def times_slopes(self, x: Tensor) -> Tensor:
        """Return `x` times the slopes."""
        return x if self.slopes is None else x * self.slopes


@dataclass(slots=True)
class Positions:
    """Values of [Note: A head in chunks] at positions [B, T]; float32 or wider."""

    label_logit: Tensor
    """[B, T]"""
    top: Tensor
    """[B, T]: m"""
    total: Tensor
    """[B, T]: S"""
    pulled: Tensor | None
    """[B, T, D]: sum_v rho_tv weight_v"""
    gram: Tensor | None
    """[B, T, T]: <rho_t, rho_s>"""
    label_slope: Tensor | None = None
    """[B, T]: slope of the cap at the label, or None"""

    @property
    def loss(self) -> Tensor:
        """Return the cross-entropy [B, T]."""
        margin = self.margin
        return torch.logaddexp(margin, torch.zeros_like(margin))

    @property
    def missing(self) -> Tensor:
        """Return u [B, T]."""
        return torch.sigmoid(self.margin)

    @property
    def margin(self) -> Tensor:
        """Return log(u / (1 - u)) [B, T]."""
        return (self.top - self.label_logit) + self.total.log()


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32 or wider."""
    return x.float() if x.element_size() < 4 else x


def head_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None, softcap: float | None = None
) -> Head:
    """Return the head for an input [..., D]; chunks have `chunk_size` classes, or some 4 million logits."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    positions = max(1, hidden.shape[:-1].numel())
    return Head(weight, bias, dtype, chunk_size or max(128, _CHUNK // positions), softcap)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which products keep their dtype."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def positions_of(
    head: Head, hidden: Tensor, labels: Tensor, *, pull: bool, gram: Callable[[Tensor], Tensor] | None
) -> Positions:
    """Read the head once, for `hidden` [B, T, D] and labels [B, T].

    `pull`: compute `pulled`. `gram`: function from rows [B, T, n] to their inner products [B, T, T], or None. A label
    that is no class gives NaN; on a CPU it raises DataError.
    """
    _refuse_other_labels(labels, len(head.weight))
    dtype = wide(hidden.new_empty(0)).dtype
    label_logit = torch.full(labels.shape, torch.nan, dtype=dtype, device=hidden.device)
    at = Positions(
        label_logit, label_logit.new_full(labels.shape, -torch.inf), torch.zeros_like(label_logit), None, None
    )
    for classes in head.chunks():
        found = head.logits(hidden, classes)
        logits, own = found.values, _own(labels, classes)
        label_logit.copy_(torch.where(own.any, logits.gather(2, own.index).squeeze(2), label_logit))
        if found.slopes is not None:
            slope = found.slopes.gather(2, own.index).squeeze(2)
            at.label_slope = slope if at.label_slope is None else torch.where(own.any, slope, at.label_slope)
        logits.scatter_(2, own.index, logits.gather(2, own.index).masked_fill(own.any[..., None], -torch.inf))
        top = torch.maximum(at.top, logits.amax(2))
        # A chunk with only the label, or with classes whose bias is -inf, adds nothing.
        base = top.masked_fill(top == -torch.inf, 0)
        shrink = torch.exp(at.top - base)
        weights = logits.sub_(base[..., None]).exp_()
        at.top, at.total = top, at.total * shrink + weights.sum(2)
        weights = found.times_slopes(weights)
        if pull:
            part = wide(weights.to(head.dtype) @ head.weight[classes].to(head.dtype))
            at.pulled = part if at.pulled is None else at.pulled.mul_(shrink[..., None]).add_(part)
        if gram is not None:
            part = gram(weights)
            at.gram = part if at.gram is None else at.gram.mul_(shrink[..., None] * shrink[:, None]).add_(part)
    _finish(at, head, hidden, labels)
    return at


def _refuse_other_labels(labels: Tensor, classes: int) -> None:
    # On other devices, a read of the labels would wait for the device.
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
        return
    least, largest = (int(x) for x in labels.aminmax())
    if least < 0 or largest >= classes:
        raise DataError(
            f"labels has {least if least < 0 else largest}, and the weight has {classes} classes. Pass labels from 0 "
            f"to {classes - 1}, and as ignore_index the label of positions that do not count."
        )


def _finish(at: Positions, head: Head, hidden: Tensor, labels: Tensor) -> None:
    """Divide by S, and add the label's entry of rho, -1."""
    if at.pulled is not None:
        own = wide(head.weight[labels].to(head.dtype))
        at.pulled = at.pulled / at.total[..., None] - (
            own if at.label_slope is None else own * at.label_slope[..., None]
        )
    if at.gram is not None:
        # The value of rho_t at the label of s. Where both labels are equal, the product of both -1 is 1.
        crossed = _softmax_but_label(at, head.logits_at(hidden, labels), labels, labels)
        equal = (labels[..., None] == labels[:, None]).to(crossed.dtype)
        if at.label_slope is not None:
            crossed = crossed * at.label_slope[:, None]
            equal = equal * at.label_slope[..., None] * at.label_slope[:, None]
        at.gram = at.gram / (at.total[..., None] * at.total[:, None]) - crossed - crossed.mT + equal


def _softmax_but_label(at: Positions, logits: Logits, labels: Tensor, ids_BK: Tensor) -> Tensor:
    shares = logits.times_slopes(torch.exp(logits.values - at.top[..., None]) / at.total[..., None])
    return shares.masked_fill(labels[..., None] == ids_BK[:, None], 0)


def rho_at(at: Positions, head: Head, hidden: Tensor, labels: Tensor, ids_BK: Tensor) -> Tensor:
    """Return rho [B, T, K] at K classes of each sample."""
    own = labels[..., None] == ids_BK[:, None]
    shares = _softmax_but_label(at, head.logits_at(hidden, ids_BK), labels, ids_BK)
    if at.label_slope is None:
        return shares.masked_fill(own, -1)
    return torch.where(own, -at.label_slope[..., None], shares)


def rho(at: Positions, head: Head, hidden: Tensor, labels: Tensor, classes: slice) -> Tensor:
    """Return rho [B, T, c] of a chunk of classes."""
    own = _own(labels, classes)
    logits = head.logits(hidden, classes)
    shares = logits.times_slopes(logits.values.sub_(at.top[..., None]).exp_().div_(at.total[..., None]))
    kept = shares.gather(2, own.index)
    if at.label_slope is None:
        return shares.scatter_(2, own.index, kept.masked_fill(own.any[..., None], -1))
    return shares.scatter_(2, own.index, torch.where(own.any[..., None], -at.label_slope[..., None], kept))


@dataclass(frozen=True, slots=True)
class _Own:
    any: Tensor
    """bool [B, T]: the label is in the chunk"""
    index: Tensor
    """[B, T, 1]: its place there, else 0"""


def _own(labels: Tensor, classes: slice) -> _Own:
    inside = (labels >= classes.start) & (labels < classes.stop)
    return _Own(inside, (labels - classes.start).masked_fill(~inside, 0)[..., None])
