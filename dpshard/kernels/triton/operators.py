"""The kernels as operators of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def _operator(schema: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """Return a decorator that makes an operator of a function. Calls are faster than with `torch.library.custom_op`."""

    def register(function: Callable[..., Any]) -> OpOverload:
        name = f"dpshard::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd", function)
        return getattr(torch.ops.dpshard, function.__name__).default

    return register


@_operator("(Tensor rows, Tensor cols, float floor) -> Tensor")
def ghost_norm_sq(rows: Tensor, cols: Tensor, floor: float) -> Tensor:
    """Return squared norms [B], float32, of sum_t rows_t (x) cols_t, summed over groups.

    Each group adds at least floor * (sum_t |rows_t| |cols_t|)^2, because Gram matrices are rounded. Squared norms
    include what underflow may hide. Rows [B, G, T, R] and cols [B, G, T, C] have any strides and one half-precision
    dtype; see `supports_product`.
    """
    from dpshard.kernels.triton import gram  # needs Triton

    with torch.cuda.device_of(rows):  # Triton launches on the current device
        return gram.ghost_norm_sq(rows, cols, floor)


@_operator("(Tensor rows, Tensor cols) -> Tensor")
def gradient_norm_sq(rows: Tensor, cols: Tensor) -> Tensor:
    """Return squared norms [B], float32, of the gradients over all groups, without storing gradients."""
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        return product.squares(rows, cols, keep=False)[0]


@_operator("(Tensor rows, Tensor cols) -> (Tensor, Tensor)")
def per_sample(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients sum_t rows_t (x) cols_t [B, G, R, C] and their squared norms [B], float32."""
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        squares, gradients = product.squares(rows, cols, keep=True)
    return gradients, squares


@_operator("(Tensor rows, Tensor cols, Tensor factors) -> Tensor")
def weighted_sum(rows: Tensor, cols: Tensor, factors: Tensor) -> Tensor:
    """Return sum_i factors_i * gradient_i, [G, R, C], float32, with float32 factors [B].

    A factor of 0 skips even a NaN.
    """
    from dpshard.kernels.triton import product

    with torch.cuda.device_of(rows):
        return product.weighted_sum(rows, cols, factors)


@_operator("(Tensor x) -> Tensor")
def row_norm_sq(x: Tensor) -> Tensor:
    """Return squared norms [B], float32, of the rows of x [B, n]; see `supports_row_norms`."""
    from dpshard.kernels.triton import rows

    with torch.cuda.device_of(x):
        return rows.row_norm_sq(x)


@_operator("(Tensor x, Tensor weights) -> Tensor")
def weighted_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums [uses, n], float32, of the rows of x [uses, B, n] by use; float32 weights [uses, B].

    See `supports_rows`. Rows of weight 0 are skipped, even if they hold NaN.
    """
    from dpshard.kernels.triton import rows

    with torch.cuda.device_of(x):
        return rows.weighted_rows(x, weights)


@_operator(
    "(Tensor(a!)[] xs, int[] starts, int[] firsts, Tensor streams, Tensor weights, int block, float std, float divisor)"
    " -> Tensor"
)
def release_(
    xs: list[Tensor],
    starts: list[int],
    firsts: list[int],
    streams: Tensor,
    weights: Tensor,
    block: int,
    std: float,
    divisor: float,
) -> Tensor:
    """Replace each x of `xs` by (x + std * noise) / divisor; return the sum of all old |x|^2, [], float64.

    philox.py defines the normals; noise is their sum over vectors, with `weights` (float32 [vectors]). The tensors are
    float32, contiguous, not empty, and on the device of `streams`. x holds elements [start, start + x.numel()) of a
    tensor. Every `block` of its elements (a multiple of 2 * philox.HALF) has its own streams. Those of the blocks that
    overlap x begin at streams[:, first] (int64 [vectors, ., 3], contiguous).
    """
    from dpshard.kernels.triton import gaussian

    with torch.cuda.device_of(streams):
        norm_sq = gaussian.release_(xs, starts, firsts, streams, weights, block, std, divisor)
    torch.autograd.graph.increment_version(xs)  # torch does not count the writes that the schema declares
    return norm_sq


@_operator("(Tensor(a!) total, Tensor[] words, int[] at, Tensor columns, Tensor rows) -> ()")
def add_digests_(total: Tensor, words: list[Tensor], at: list[int], columns: Tensor, rows: Tensor) -> None:
    """Add to `total` (int64 [2]) the digests of all `words` (int32 [n], n > 0), exactly.

    The first word of a tensor has its place `at` in its row. Weights of columns are int32 [2, WIDTH]. Those of the rows
    that the words meet are int64 [R, 2], one tensor after another. All are contiguous and on one device; see
    noise/digest.py.
    """
    from dpshard.kernels.triton import digest

    with torch.cuda.device_of(total):
        digest.add_digests_(total, words, at, columns, rows)
    torch.autograd.graph.increment_version(total)


def _norms(rows: Tensor) -> Tensor:
    return rows.new_empty(len(rows), dtype=torch.float32)


def _gradients(rows: Tensor, cols: Tensor, *samples: int) -> Tensor:
    return rows.new_empty(*samples, rows.shape[1], rows.shape[3], cols.shape[3], dtype=torch.float32)


for _name, _fake in {
    "ghost_norm_sq": lambda rows, cols, floor: _norms(rows),
    "gradient_norm_sq": lambda rows, cols: _norms(rows),
    "per_sample": lambda rows, cols: (_gradients(rows, cols, len(rows)), _norms(rows)),
    "add_digests_": lambda *_: None,
    "release_": lambda xs, *_: xs[0].new_empty((), dtype=torch.float64),
    "weighted_sum": lambda rows, cols, factors: _gradients(rows, cols),
    "row_norm_sq": _norms,
    "weighted_rows": lambda x, weights: x.new_empty(len(x), x.shape[2], dtype=torch.float32),
}.items():
    torch.library.register_fake(f"dpshard::{_name}", _fake)
