"""Normals by the Box-Muller method, and their addition to a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import Table, addresses, library, sizes


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    After Box and Muller 1958: 31 bits of each of two words give the radius. One word gives the angle, or two in
    float64. Each unit of `words`, and `normals`, are contiguous. May overwrite `words` and `scratch` [3 or 4, units,
    n], of the normals' dtype.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, scratch)
    else:
        compiled.normals(words, normals)


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Replace `x` [n] by (x + std * noise) / divisor in place. With a wider `noise`, only the result is rounded.

    Both are contiguous, float32 or float64, and `noise` is not narrower than `x`. May overwrite `noise`.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor)


class Pieces:
    """Pieces of parts of a tensor, each with a stream of random words of its own.

    Rows (part, first, half, lo, end), int64 [N, 5]. The stream of a piece gives normals [2, half]. Normals [lo, end)
    are for the elements of the flattened part from `first` on. Raises ValueError for pieces outside their parts.
    """

    def __init__(self, sizes: Sequence[int], rows: NDArray[np.int64]) -> None:
        part, first, self._half, self._lo, self._end = rows.T
        fits = (self._lo >= 0) & (self._lo < self._end) & (self._end <= 2 * self._half) & (first >= 0)
        if not (fits & (first + self._end - self._lo <= np.array(sizes, np.int64)[part])).all():
            raise ValueError("No noise for pieces outside their parts.")
        self.sizes, self.rows = [*sizes], rows

    def at(self, parts: Sequence[Tensor]) -> Table:
        """Return the table (address, half, lo, end) for compiled code, for contiguous parts of these sizes."""
        found = self.rows[:, 1:].copy()
        found[:, 0] *= parts[0].itemsize
        found[:, 0] += np.fromiter(addresses(parts), np.int64)[self.rows[:, 0]]
        return found

    def bytes_of_streams(self, *, wide: bool) -> list[int]:
        """Bytes that each piece needs of each of its streams."""
        half, lo, end = self._half, self._lo, self._end
        last = np.where(end <= half, end, np.where(lo < half, half, end - half))  # end of the pairs; see pairs_of
        return (4 * ((3 if wide else 2) * half + last)).tolist()


def release_pieces_(
    parts: Sequence[Tensor], pieces: Pieces, keys: Sequence[bytes], std: float, divisor: float, *, wide: bool
) -> None:
    """Replace every piece x by (x + std * noise) / divisor in place.

    Args:
        parts: Contiguous tensors on the CPU, all float32 or all float64.
        pieces: Pieces of these parts, at least one.
        keys: Keys of streams: as many for every piece, one piece after another. A stream is that of
            randomness.RandomSource: words int32 [3 or 4, half]. The noise is the sum of their normals, scaled to unit
            variance.
        std: Standard deviation of the noise.
        divisor: Divisor of the sums.
        wide: Draw float64 noise, which float64 parts need.

    Raises ValueError for other parts or keys.
    """
    kind, (summands, rest) = parts[0].dtype, divmod(len(keys), len(pieces.rows))
    alike = {x.dtype for x in parts} == {kind} and {x.is_cpu for x in parts} == {True}
    alike = alike and all(map(Tensor.is_contiguous, parts)) and [*sizes(parts)] == pieces.sizes
    fits = kind is torch.float32 or (kind is torch.float64 and wide)
    if not (alike and fits and {*map(len, keys)} == {32} and rest == 0 and (wide or summands == 1)):
        raise ValueError(f"No noise for these {len(parts)} tensors of {kind} from {len(keys)} keys.")
    compiled, of_double = library(), kind is torch.float64
    if compiled is not None and compiled.has_cipher:
        compiled.release_keyed_(pieces.at(parts), keys, std, divisor, (of_double, wide))
        return
    lengths = [n for n in pieces.bytes_of_streams(wide=wide) for _ in range(summands)]
    table = pieces.at(parts)
    flat = [x.detach().view(-1).numpy() for x in parts]
    for start, stop in _batches(lengths[::summands], _TOGETHER // summands):
        some = slice(start * summands, stop * summands)
        streams = reference.streams(keys[some], lengths[some])
        if compiled is not None:
            compiled.release_pieces_(table[start:stop], streams, std, divisor, (of_double, wide))
            continue
        for i, (part, first, half, lo, end) in enumerate(pieces.rows[start:stop].tolist()):
            own, x = streams[i * summands : (i + 1) * summands], flat[part][first : first + end - lo]
            reference.release_piece_(x, own, half, lo, end, std, divisor, np.float64 if wide else np.float32)


_TOGETHER = 2**20
"""Bytes of streams that are made at once. More do not fit the cache, and fewer are mostly overhead."""


def _batches(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive indices whose sizes add up to at most `most`. A single larger one is a range, too."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)
