"""Box and Muller's normals, and their addition to a sum, in compiled code or numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library, table, team
from dpshard.kernels.native.reference import pairs_of


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    After Box and Muller 1958. The radius of a pair takes 31 bits of each of two words; the angle takes one word, or two
    in float64. Each unit of `words`, and `normals`, are contiguous. May overwrite `words` and `scratch` [3 or 4, units,
    n], of the dtype of the normals.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, scratch)
    else:
        compiled.normals(words, normals, team())


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Replace `x` [n] by (x + std * noise) / divisor in place; a wider `noise` makes it round once.

    Both arrays are contiguous, float32 or float64, and `noise` is not narrower than `x`. May overwrite `noise`.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor, team())


class Piece(NamedTuple):
    """Elements that get normals of their own streams."""

    x: Tensor
    """Contiguous, on the CPU, float32 or float64."""
    first: int
    """The piece's first element, in the flattened `x`."""
    half: int
    """A stream makes the normals [2, half]; their first and second elements come from one pair of words."""
    lo: int
    """The piece gets the normals [lo, end) of the flattened ones."""
    end: int

    def nbytes(self, *, wide: bool) -> int:
        """Bytes that it needs of every stream, for float64 noise if `wide`, else float32."""
        return 4 * ((3 if wide else 2) * self.half + pairs_of(self.half, self.lo, self.end)[1])


def release_pieces_(
    pieces: Sequence[Piece], streams: Sequence[bytes], std: float, divisor: float, *, wide: bool
) -> None:
    """Replace every piece x by (x + std * noise) / divisor in place, in one call; all are of one dtype.

    `streams`: random words, int32 [3 or 4, half], as many streams for every piece, one piece after another. Noise is
    the sum of a piece's normals, scaled to unit variance; float64 if `wide`, which float64 pieces need. Raises
    ValueError for a stream that is too short, and for pieces without compiled code's layout.
    """
    kind, summands, rows = pieces[0].x.dtype, len(streams) // len(pieces), []
    for i, piece in enumerate(pieces):
        x, first, half, lo, end = piece
        own, needed = streams[i * summands : (i + 1) * summands], piece.nbytes(wide=wide)
        fits = 0 <= lo < end <= 2 * half and 0 <= first <= x.numel() - (end - lo) and all(len(s) >= needed for s in own)
        if not (fits and x.dtype is kind and x.is_contiguous() and x.is_cpu):
            raise ValueError(f"No noise for elements [{lo}, {end}) of {x.dtype} {tuple(x.shape)} from {needed} bytes.")
        rows.append((x.data_ptr() + first * x.itemsize, half, lo, end))
    compiled, of_double = library(), kind == torch.float64
    if compiled is not None:
        compiled.release_pieces_(
            table(rows), streams, std=std, divisor=divisor, wide=(of_double, wide or of_double), team=team()
        )
        return
    for i, (x, first, half, lo, end) in enumerate(pieces):
        part = x.detach().view(-1).numpy()[first : first + end - lo]
        own = streams[i * summands : (i + 1) * summands]
        reference.release_piece_(part, own, half, lo, end, std, divisor, np.float64 if wide else np.float32)
