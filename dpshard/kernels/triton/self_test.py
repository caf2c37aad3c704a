"""Compare the kernels with torch's own results, once on each device. Needs Triton.

A wrong kernel would understate norms, omit noise, or use one noise for other sums, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dpshard.kernels import philox
from dpshard.kernels.triton import operators

_SIZES = ((2, 2, 70, 40, 33), (22, 1, 257, 17, 16), (64, 1, 33, 130, 20), (43, 1, 65, 20, 18))
"""Samples, groups, positions, rows, columns: each size of tile of Gram matrices, and of gradients."""

_ROWS = ((1, 3, 5), (2, 40, 2500))
"""Uses, samples, elements."""

_WIDTH = 4096
"""Words of a row in noise/digest.py."""
_STRETCHES = ((0, 1), (4095, 2), (1027, 9000), (16, 304 * _WIDTH - 32))
"""Place of the first word in its row, words: one and several rows, alone and in a group."""

_BLOCK = 4 * philox.HALF
_SHARDS = ((_BLOCK - 7, 3 * _BLOCK), (5, 1), (3 * _BLOCK, _BLOCK + 1))
"""Place of the first element, and elements: four blocks, one, and two."""


def wrong_noise(device: torch.device) -> str | None:
    """Return the name of the noise kernel if its results differ from those of philox.py, else None."""
    generator = _generator(device)
    xs = [_randn(n, generator=generator) for _, n in _SHARDS]
    names = [[[3**30 + i + vector, -(5**20) - i, 7**21 * (1 - i)] for i in range(7)] for vector in range(2)]
    streams, weights = torch.tensor(names, device=device), torch.tensor([1.0, -0.5], device=device).float()
    starts, firsts, expected = [start for start, _ in _SHARDS], [0, 4, 5], [x.clone() for x in xs]
    norm_sq = operators.release_(xs, starts, firsts, streams, weights, _BLOCK, 0.3, 7.0)
    expected_norm_sq = torch.zeros_like(norm_sq)
    for x, start, first, end in zip(expected, starts, firsts, [4, 5, 7], strict=True):
        expected_norm_sq += philox.release_(x, streams[:, first:end], weights, _BLOCK, start, 0.3, 7.0)
    found = [(norm_sq, expected_norm_sq, expected_norm_sq), (torch.cat(xs), torch.cat(expected), 1.0)]
    return None if all(_is_near(*pair) for pair in found) else "release_"


def wrong_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the name of the first kernel whose products differ from torch's in float64, or None."""
    generator = _generator(device)
    for B, G, T, R, C in _SIZES:
        rows = _randn(B, G, T, R, generator=generator).to(dtype)
        cols = _randn(B, G, T, C, generator=generator).to(dtype)
        factors = torch.rand(B, generator=generator, device=device, dtype=torch.float32)
        for name, found, expected, scale in _products(rows, cols, factors):
            if not _is_near(found, expected, scale):
                return name
    return None


def _products(rows: Tensor, cols: Tensor, factors: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield names, results, results in float64, and sums of magnitudes, to which rounding is proportional."""
    r, c = rows.double(), cols.double()
    gradients, sizes = r.mT @ c, r.abs().mT @ c.abs()
    norm_sq = gradients.square().sum((1, 2, 3))
    scale_sq = (r.norm(dim=3) * c.norm(dim=3)).sum(2).square().sum(1)
    yield "ghost_norm_sq", operators.ghost_norm_sq(rows, cols, 0.0), norm_sq, scale_sq
    yield "ghost_norm_sq", operators.ghost_norm_sq(rows, cols, 1.0), scale_sq, scale_sq
    yield "gradient_norm_sq", operators.gradient_norm_sq(rows, cols), norm_sq, norm_sq
    kept, squares = operators.per_sample(rows, cols)
    yield "per_sample", squares, norm_sq, norm_sq
    yield "per_sample", kept, gradients, sizes
    weights = factors.double()
    total, total_size = (torch.einsum("b,bgrc->grc", weights, x) for x in (gradients, sizes))
    yield "weighted_sum", operators.weighted_sum(rows, cols, factors), total, total_size
    factors, rows = factors.clone(), rows.clone()
    factors[0], rows[0] = 0, torch.nan
    rest, rest_size = (torch.einsum("b,bgrc->grc", weights[1:], x[1:]) for x in (gradients, sizes))
    yield "weighted_sum", operators.weighted_sum(rows, cols, factors), rest, rest_size


def wrong_rows(device: torch.device) -> str | None:
    """Return the name of a kernel of rows if it differs from torch in float64, else None."""
    generator = _generator(device)
    for uses, B, n in _ROWS:
        x = _randn(uses, B, n, generator=generator)
        weights = torch.rand(uses, B, generator=generator, device=device, dtype=torch.float32)
        exact, norm_sq = x.double(), x.double().square().sum(2).flatten()
        if not _is_near(operators.row_norm_sq(x.flatten(0, 1)), norm_sq, norm_sq):
            return "row_norm_sq"
        weights[:, 0], x[:, 0], exact[:, 0] = 0, torch.nan, 0
        total, size = (torch.einsum("ub,ubn->un", weights.double(), rows) for rows in (exact, exact.abs()))
        if not _is_near(operators.weighted_rows(x, weights), total, size):
            return "weighted_rows"
    return None


def wrong_digest(device: torch.device) -> str | None:
    """Return the name of the digest's kernel if it differs from torch in one bit, else None."""
    generator = _generator(device)

    def drawn(bits: int, *shape: int) -> Tensor:
        return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, shape, generator=generator, device=device)

    columns, found = drawn(32, 2, _WIDTH), drawn(64, 2)
    expected, all_words, all_rows = found.clone(), [], []
    for at, n in _STRETCHES:
        words, rows = drawn(32, n), drawn(64, -(-(at + n) // _WIDTH), 2)
        matrix = torch.nn.functional.pad(words, (at, len(rows) * _WIDTH - at - n)).view(-1, 1, _WIDTH)
        expected += ((matrix * columns).sum(2) * rows).sum(0)
        all_words.append(words.int())
        all_rows.append(rows)
    operators.add_digests_(found, all_words, [at for at, _ in _STRETCHES], columns.int(), torch.cat(all_rows))
    return None if torch.equal(found, expected) else "add_digests_"


def _is_near(found: Tensor, expected: Tensor, scale: Tensor | float) -> bool:
    """Return True if `found` is `expected` within 1e-5 of `scale`; NaN is not near."""
    return bool(((found.double() - expected.double()).abs() <= 1e-5 * scale).all())


def _randn(*shape: int, generator: torch.Generator) -> Tensor:
    """Return float32 normals, also where a script has set another default dtype."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
