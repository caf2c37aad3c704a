"""Records: what is known, sample by sample, about the gradient of one parameter after one use of it.

[Note: Records]
A use of a parameter leaves one of three records. B samples, G groups of a weight, T positions, R rows, C columns:

    OuterProduct   rows [B, G, T, R], cols [B, G, T, C]     gradient of sample i: sum_t rows_it (x) cols_it, [G, R, C]
    Gather         ids [B, T], values [B, T, C]             gradient of sample i: values_it added to row ids_it, [V, C]
    PerSample      gradient [B, *shape]                     the gradient itself

Each gives its squared norm [B], the per-sample gradients, and the sum weighted by factors [B]. A parameter that is
used several times has the sum of its records as its gradient: records of a kind join into one, and kinds that stay
apart have inner products, so that norms hold all cross terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dpshard.config import NormMethod


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is wider: norms and sums never accumulate in half precision."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class PerSample:
    """Per-sample gradients [B, *shape] of a parameter of shape [*shape]."""

    gradient: Tensor

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], float32 or float64."""
        return torch.linalg.vector_norm(_flat(self.gradient), dim=1).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return wide(self.gradient)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        flat = _flat(self.gradient)
        return (factor_B.to(flat.dtype) @ flat).view(self.gradient.shape[1:])

    def without(self, dead_B: Tensor) -> PerSample:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        return PerSample(_blank(self.gradient, dead_B))


@dataclass(frozen=True, slots=True)
class OuterProduct:
    """Gradient sum_t rows_t (x) cols_t of a weight [G, R, C], viewed as `shape`; G = 1 but for grouped convolutions."""

    rows: Tensor
    """[B, G, T, R]"""
    cols: Tensor
    """[B, G, T, C]"""
    shape: torch.Size
    """Shape of the parameter; its elements in order are those of [G, R, C]."""

    def instantiates(self, method: NormMethod, *, kept: bool) -> bool:
        """Whether the norm is taken of the gradient itself; the cheapest is the ghost norm if 2 T^2 <= R C.

        Bu et al. 2022, arXiv:2205.10683, Sec. 4. One sample's gradient is the batch's, which the sum needs anyway: its
        norm costs nothing if the gradient is `kept` until then. Gram matrices of very many positions do not resolve
        the norm; see _gram_floor.
        """
        (B, _, T, R), C = self.rows.shape, self.cols.shape[3]
        if method is not NormMethod.CHEAPEST:
            return method is NormMethod.INSTANTIATE
        unresolved = _RESOLUTION * torch.finfo(wide_dtype(self.rows)).eps * T > 0.5
        return (B == 1 and kept) or 2 * T * T > R * C or unresolved

    def shrinks(self) -> bool:
        """Whether the per-sample gradients take no more memory than the record."""
        gradients = len(self.rows) * self.shape.numel() * wide_dtype(self.rows).itemsize
        return gradients <= self.rows.nbytes + self.cols.nbytes

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B], by the Gram matrices or by the gradient itself.

        |sum_t r_t (x) c_t|^2 = sum_{t,t'} <r_t, r_t'> <c_t, c_t'>; Goodfellow 2015, arXiv:1510.01799;
        Li et al. 2022, arXiv:2110.05679.
        """
        rows, cols = wide(self.rows), wide(self.cols)
        if self.instantiates(method, kept=False):
            # The clipped sum is another product, rounded in another order.
            scale = (rows.norm(dim=3) * cols.norm(dim=3)).sum((1, 2)).square()
            return torch.maximum(PerSample(self.per_sample()).norm_sq(method), _sum_floor(scale))
        if self.rows.shape[2] == 1:
            return (rows.square().sum(3) * cols.square().sum(3)).sum((1, 2))
        gram_r, gram_c = rows @ rows.mT, cols @ cols.mT
        scale = (gram_r.diagonal(0, 2, 3) * gram_c.diagonal(0, 2, 3)).sqrt().sum((1, 2)).square()
        return torch.maximum((gram_r * gram_c).sum((1, 2, 3)), _gram_floor(scale))

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return (wide(self.rows).mT @ wide(self.cols)).reshape(-1, *self.shape)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape], in one matrix product per group."""
        rows, cols = wide(self.rows), wide(self.cols)
        # The cheaper side takes the factors.
        if rows.numel() <= cols.numel():
            rows = rows * factor_B.to(rows.dtype)[:, None, None, None]
        else:
            cols = cols * factor_B.to(cols.dtype)[:, None, None, None]
        rows_GNR, cols_GNC = (x.transpose(0, 1).flatten(1, 2) for x in (rows, cols))
        return (rows_GNR.mT @ cols_GNC).view(self.shape)

    def without(self, dead_B: Tensor) -> OuterProduct:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        return replace(self, rows=_blank(self.rows, dead_B), cols=_blank(self.cols, dead_B))


@dataclass(frozen=True, slots=True)
class Gather:
    """Gradient of a parameter seen as a table [V, C], of which row ids_it was read at position t of sample i."""

    ids: Tensor
    """[B, T], int64; a negative id was no read (padding_idx)"""
    values: Tensor
    """[B, T, C]: gradient of what was read"""
    shape: torch.Size
    """Shape of the parameter; its elements in order are those of [V, C]."""

    def _read(self) -> Tensor:
        return torch.where((self.ids >= 0)[:, :, None], wide(self.values), 0)

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]: sorted by id, values of equal ids add up before the square; no T x T, no [B, V, C]."""
        values = self._read()
        ids, order = self.ids.sort(dim=1)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run_BT = starts.cumsum(1) - 1
        values = values.gather(1, order[:, :, None].expand_as(values))
        runs = torch.zeros_like(values).scatter_add_(1, run_BT[:, :, None].expand_as(values), values)
        return torch.maximum(runs.square().sum((1, 2)), _sum_floor(values.norm(dim=2).sum(1).square()))

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        values = self._read()
        B, _, C = values.shape
        out = values.new_zeros(B, self.shape.numel() // C, C)
        out.scatter_add_(1, self.ids.clamp(min=0)[:, :, None].expand_as(values), values)
        return out.view(B, *self.shape)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        values = self._read() * factor_B.to(wide(self.values).dtype)[:, None, None]
        C = values.shape[2]
        out = values.new_zeros(self.shape.numel() // C, C)
        return out.index_add_(0, self.ids.clamp(min=0).flatten(), values.flatten(0, 1)).view(self.shape)

    def without(self, dead_B: Tensor) -> Gather:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        return replace(self, values=_blank(self.values, dead_B))


Record = PerSample | OuterProduct | Gather


def offloaded(record: Record) -> Record:
    """`record` in the memory of the host, pinned, so that the copy need not be waited for."""
    return _with(record, _to_host)


def fetched(record: Record, device: torch.device) -> Record:
    """An offloaded record, back on `device`."""
    return _with(record, lambda x: x.to(device, non_blocking=True))


def _with(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    tensors = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: change(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    # Both ways on the current stream: nobody takes the memory of `x`, or reads the copy, before it is through.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _flat(x: Tensor) -> Tensor:
    """`x` [B, *shape] as wide rows [B, elements]; a scalar parameter has one element."""
    return wide(x).reshape(len(x), -1)


def _blank(x: Tensor, dead_B: Tensor) -> Tensor:
    # masked_fill, not a product: 0 * NaN is NaN.
    return x.masked_fill(dead_B.view(-1, *[1] * (x.dim() - 1)), 0)


def join(records: Sequence[Record]) -> list[Record]:
    """The same gradient from at most one record of each kind."""
    kinds: dict[object, list[Record]] = {}
    for record in records:
        kinds.setdefault(_kind(record), []).append(record)
    return [_join(kind) if len(kind) > 1 else kind[0] for kind in kinds.values()]


def _kind(record: Record) -> object:
    """What records share that join: a grouped and a plain product of one weight, say, have different [G, R, C]."""
    if isinstance(record, OuterProduct):
        return record.rows.shape[1], record.rows.shape[3], record.cols.shape[3]
    return record.values.shape[2] if isinstance(record, Gather) else PerSample


def _join(kind: Sequence[Record]) -> Record:
    first = kind[0]
    if isinstance(first, OuterProduct):
        outer = [r for r in kind if isinstance(r, OuterProduct)]
        return replace(first, rows=torch.cat([r.rows for r in outer], 2), cols=torch.cat([r.cols for r in outer], 2))
    if isinstance(first, Gather):
        gathers = [r for r in kind if isinstance(r, Gather)]
        ids, values = torch.cat([r.ids for r in gathers], 1), torch.cat([r.values for r in gathers], 1)
        return replace(first, ids=ids, values=values)
    return PerSample(sum((r.per_sample() for r in kind[1:]), first.per_sample()))


def measure(
    records: Sequence[Record], method: NormMethod, *, keep: bool, closing: bool = False
) -> tuple[Tensor, list[Record]]:
    """Squared norm [B] of the sum of the records' gradients, cross terms included, and records of the same sum.

    With `keep`, a per-sample gradient that was instantiated for its norm stands in for the record it came from. The
    cheapest method keeps it only if it is the smaller of the two, or is used at once, since its group is `closing`:
    at a micro-batch of 1 the per-sample gradients of a model are as large as the model.
    """
    joined = join(records)
    if len(joined) == 1:
        (record,) = joined
        if isinstance(record, OuterProduct):
            kept = keep and (method is NormMethod.INSTANTIATE or closing or record.shrinks())
            if kept and record.instantiates(method, kept=True):
                gradient = PerSample(record.per_sample())
                return gradient.norm_sq(method), [gradient]
        return record.norm_sq(method), joined
    squares = sum((r.norm_sq(method) for r in joined[1:]), joined[0].norm_sq(method))
    total = squares
    for i, first in enumerate(joined):
        for second in joined[i + 1 :]:
            total = total + 2 * inner(first, second)
    return torch.maximum(total, _gram_floor(squares)), joined


_RESOLUTION = 1024
"""Roundings by which a sum may be off, in units of eps times the sum of the absolute values of its terms."""


def _gram_floor(scale_sq: Tensor) -> Tensor:
    """The squared norm below which a sum of inner products, as large as `scale_sq` in all, is lost to rounding.

    What cancels in a sum of inner products is lost, but not in the clipped sum: a norm that comes out too small would
    let a sample contribute more than the threshold. So no norm is taken to be below this. Positions whose gradients
    are orthogonal have the squared norm scale_sq / T, which is below it from T = 8,192 on in float32.
    """
    return _RESOLUTION * torch.finfo(scale_sq.dtype).eps * scale_sq


def _sum_floor(scale_sq: Tensor) -> Tensor:
    """The same where gradients are summed before they are squared: here the norm, not its square, is off by eps."""
    return (_RESOLUTION * torch.finfo(scale_sq.dtype).eps) ** 2 * scale_sq


def inner(first: Record, second: Record) -> Tensor:
    """Inner products [B] of the per-sample gradients of two records of one parameter."""
    if isinstance(first, Gather) and isinstance(second, OuterProduct):
        first, second = second, first
    if (
        isinstance(first, OuterProduct)
        and isinstance(second, Gather)
        and first.rows.shape[1] == 1
        and first.cols.shape[3] == second.values.shape[2]
    ):
        return _inner_outer_gather(first, second)
    return (_flat(first.per_sample()) * _flat(second.per_sample())).sum(1)


def _inner_outer_gather(outer: OuterProduct, gather: Gather) -> Tensor:
    """<sum_t r_t (x) c_t, gather> = sum_{t,t'} r_t[id_t'] <c_t, v_t'>: a tied embedding and head, never a [V, C]."""
    rows_BTV, cols_BTC, values_BTC = wide(outer.rows)[:, 0], wide(outer.cols)[:, 0], gather._read()
    ids = gather.ids.clamp(min=0)
    picked_BTt = rows_BTV.gather(2, ids[:, None, :].expand(-1, rows_BTV.shape[1], -1))
    return (picked_BTt * (cols_BTC @ values_BTC.mT)).sum((1, 2))
