"""Records: what is known, sample by sample, about the gradient of one parameter after one use of it.

[Note: Records]
A use of a parameter leaves one of four records. B samples, G groups of a weight, T positions, R rows, C columns:

    OuterProduct   rows [B, G, T, R], cols [B, G, T, C]     gradient of sample i: sum_t rows_it (x) cols_it, [G, R, C]
    Gather         ids [B, T], values [B, T, C]             gradient of sample i: values_it added to row ids_it, [V, C]
    PerSample      gradient [B, *shape]                     the gradient itself
    RoutedProduct  rows [N, R], cols [N, C]                 an OuterProduct of the rows of all samples, in any order

Each gives its squared norm [B], the per-sample gradients, and the sum weighted by factors [B]. A parameter that is
used several times has the sum of its records as its gradient: records of a kind join into one, and kinds that stay
apart have inner products, so that norms hold all cross terms.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return torch.linalg.vector_norm(flat(self.gradient), dim=1).square()

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return wide(self.gradient)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        rows = flat(self.gradient)
        return (factor_B.to(rows.dtype) @ rows).view(self.gradient.shape[1:])

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
        the norm; see gram_floor.
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
        return torch.maximum((gram_r * gram_c).sum((1, 2, 3)), gram_floor(scale))

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

    def read(self) -> Tensor:
        """The values, zero where nothing was read."""
        return torch.where((self.ids >= 0)[:, :, None], wide(self.values), 0)

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]: sorted by id, values of equal ids add up before the square; no T x T, no [B, V, C]."""
        values = self.read()
        ids, order = self.ids.sort(dim=1)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run_BT = starts.cumsum(1) - 1
        values = values.gather(1, order[:, :, None].expand_as(values))
        runs = torch.zeros_like(values).scatter_add_(1, run_BT[:, :, None].expand_as(values), values)
        return torch.maximum(runs.square().sum((1, 2)), _sum_floor(values.norm(dim=2).sum(1).square()))

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        values = self.read()
        B, _, C = values.shape
        out = values.new_zeros(B, self.shape.numel() // C, C)
        out.scatter_add_(1, self.ids.clamp(min=0)[:, :, None].expand_as(values), values)
        return out.view(B, *self.shape)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        values = self.read() * factor_B.to(wide(self.values).dtype)[:, None, None]
        C = values.shape[2]
        out = values.new_zeros(self.shape.numel() // C, C)
        return out.index_add_(0, self.ids.clamp(min=0).flatten(), values.flatten(0, 1)).view(self.shape)

    def without(self, dead_B: Tensor) -> Gather:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        return replace(self, values=_blank(self.values, dead_B))


@dataclass(frozen=True, slots=True)
class RoutedProduct:
    """Gradient sum_n rows_n (x) cols_n of a weight [G, R, C], over the rows n that the data sent to group_n.

    The rows of all samples lie side by side in any order, as experts see them; sample_n is whose row it is.
    """

    rows: Tensor
    """[N, R]"""
    cols: Tensor
    """[N, C]"""
    sample: Tensor
    """[N], int64, in 0..B-1"""
    group: Tensor
    """[N], int64; rows whose group is not in 0..G-1 met no weight"""
    batch_size: int
    """B"""
    shape: torch.Size
    """Shape of the parameter; its elements in order are those of [G, R, C]."""

    @property
    def groups(self) -> int:
        """G."""
        return self.shape.numel() // (self.rows.shape[1] * self.cols.shape[1])

    def _by(self, key: Tensor, rows: Tensor) -> tuple[Tensor, OuterProduct]:
        """The K distinct values of `key` [N], and a product [R, C] of the rows of each, padded with zeros."""
        met = (self.group >= 0) & (self.group < self.groups)
        key, rows, cols = key[met], rows[met], wide(self.cols[met])
        order = key.argsort(stable=True)
        keys, place, counts = torch.unique_consecutive(key[order], return_inverse=True, return_counts=True)
        longest = int(counts.max()) if len(counts) else 0
        within = torch.arange(len(order), device=key.device) - (counts.cumsum(0) - counts)[place]

        def padded(x: Tensor) -> Tensor:
            out = x.new_zeros(len(keys), 1, longest, x.shape[1])
            out[place, 0, within] = x[order]
            return out

        return keys, OuterProduct(padded(rows), padded(cols), torch.Size((rows.shape[1], cols.shape[1])))

    def norm_sq(self, method: NormMethod) -> Tensor:
        """Squared norms [B]: groups are different elements of the weight, so theirs add up."""
        keys, product = self._by(self.sample * self.groups + self.group, wide(self.rows))
        norm_sq = product.norm_sq(method)
        return norm_sq.new_zeros(self.batch_size).index_add_(0, keys // self.groups, norm_sq)

    def per_sample(self) -> Tensor:
        """Per-sample gradients [B, *shape]."""
        return self._placed(self.sample * self.groups + self.group, wide(self.rows), self.batch_size)

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        """sum_i factor_i * gradient_i, [*shape]."""
        rows = wide(self.rows)
        return self._placed(self.group, rows * factor_B.to(rows.dtype)[self.sample][:, None], 1)[0]

    def _placed(self, key: Tensor, rows: Tensor, n: int) -> Tensor:
        keys, product = self._by(key, rows)
        out = rows.new_zeros(n * self.groups, *product.shape)
        out[keys] = product.per_sample()
        return out.view(n, *self.shape)

    def without(self, dead_B: Tensor) -> RoutedProduct:
        """The record with the samples of `dead_B` (bool [B]) replaced by exact zeros."""
        dead_N = dead_B[self.sample]
        return replace(self, rows=_blank(self.rows, dead_N), cols=_blank(self.cols, dead_N))


Record = PerSample | OuterProduct | Gather | RoutedProduct


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


def flat(x: Tensor) -> Tensor:
    """`x` [B, *shape] as wide rows [B, elements]; a scalar parameter has one element."""
    return wide(x).reshape(len(x), x.shape[1:].numel())


def _blank(x: Tensor, dead_B: Tensor) -> Tensor:
    # masked_fill, not a product: 0 * NaN is NaN.
    return x.masked_fill(dead_B.view(-1, *[1] * (x.dim() - 1)), 0)


_RESOLUTION = 1024
"""Roundings by which a sum may be off, in units of eps times the sum of the absolute values of its terms."""


def gram_floor(scale_sq: Tensor) -> Tensor:
    """The squared norm below which a sum of inner products, as large as `scale_sq` in all, is lost to rounding.

    What cancels in a sum of inner products is lost, but not in the clipped sum: a norm that comes out too small would
    let a sample contribute more than the threshold. So no norm is taken to be below this. Positions whose gradients
    are orthogonal have the squared norm scale_sq / T, which is below it from T = 8,192 on in float32.
    """
    return _RESOLUTION * torch.finfo(scale_sq.dtype).eps * scale_sq


def _sum_floor(scale_sq: Tensor) -> Tensor:
    """The same where gradients are summed before they are squared: here the norm, not its square, is off by eps."""
    return (_RESOLUTION * torch.finfo(scale_sq.dtype).eps) ** 2 * scale_sq
