"""Box and Muller's normals, and their addition to a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library, team


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    After Box and Muller 1958: 31 bits of each of two words for the radius, one word for the angle, or two in float64.
    Each unit of `words`, and `normals`, are contiguous. May overwrite `words` and `scratch` [3 or 4, units, n], of the
    normals' dtype.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, scratch)
    else:
        compiled.normals(words, normals, team())


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Replace `x` [n] by (x + std * noise) / divisor in place; a wider `noise` makes it round once.

    Both are contiguous, float32 or float64, and `noise` is not narrower than `x`. May overwrite `noise`.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor, team())


def bytes_of_streams(pieces: NDArray[np.int64], *, wide: bool) -> NDArray[np.int64]:
    """Bytes [N] that pieces [N, 5] of `release_pieces_` need of each of their streams."""
    half, lo, end = pieces[:, 2], pieces[:, 3], pieces[:, 4]
    last = np.where(end <= half, end, np.where(lo < half, half, end - half))  # after the last pair; see pairs_of
    return 4 * ((3 if wide else 2) * half + last)


def release_pieces_(
    parts: Sequence[Tensor],
    pieces: NDArray[np.int64],
    streams: Sequence[bytes],
    std: float,
    divisor: float,
    *,
    wide: bool,
) -> None:
    """Replace every piece x by (x + std * noise) / divisor in place, in one call.

    Args:
        parts: Contiguous tensors on the CPU, all float32 or all float64.
        pieces: Rows (part, first, half, lo, end), int64 [N, 5], N > 0. A stream makes the normals [2, half]. The
            elements of the flattened part from `first` on get those in [lo, end).
        streams: Random words, int32 [3 or 4, half], as many streams for every piece, piece after piece. The noise is
            the sum of their normals, scaled to unit variance.
        std: Standard deviation of the noise.
        divisor: Divisor of the sums.
        wide: Draw float64 noise, which float64 parts need.

    Raises ValueError for other layouts, pieces outside their parts, and short streams.
    """
    count, kind = len(pieces), parts[0].dtype
    summands, of_double = len(streams) // count, kind == torch.float64
    index, first, half, lo, end = pieces.T
    sizes = np.array([x.numel() for x in parts])
    fits = (lo >= 0) & (lo < end) & (end <= 2 * half) & (first >= 0) & (first + end - lo <= sizes[index])
    long = np.fromiter(map(len, streams), np.int64).reshape(count, -1) >= bytes_of_streams(pieces, wide=wide)[:, None]
    alike = all(x.dtype is kind and x.is_cpu and x.is_contiguous() for x in parts) and (wide or not of_double)
    if not (fits.all() and long.all() and alike and kind in (torch.float32, torch.float64)):
        raise ValueError(f"No noise for pieces of {kind} tensors here, or for {len(streams)} streams.")
    compiled = library()
    if compiled is not None:
        rows = pieces[:, 1:].copy()
        rows[:, 0] = np.array([x.data_ptr() for x in parts])[index] + first * parts[0].itemsize
        compiled.release_pieces_(rows, streams, std, divisor, (of_double, wide), team())
        return
    kind = np.float64 if wide else np.float32
    flat = [x.detach().view(-1).numpy() for x in parts]
    for i, (part, start, half, lo, end) in enumerate(pieces.tolist()):
        own = streams[i * summands : (i + 1) * summands]
        reference.release_piece_(flat[part][start : start + end - lo], own, half, lo, end, std, divisor, kind)
